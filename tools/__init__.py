"""What makes the documentation: pages whose code runs, a site, references made from the code, tables made from measurements."""
