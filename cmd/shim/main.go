// Command shim is part of the Keelson agent's container runtime.
package main

func main() {}
