// Package agentport lists the ports on which every agent listens on the addresses of its machine.
package agentport

// The ports on which an agent with default settings listens.
const (
	HTTPS     = 10250 // TCP: the node's own HTTPS server
	Health    = 10256 // TCP: health of Service rules, for load balancers in front of nodes
	VXLAN     = 4789  // UDP: packets of pods between nodes (RFC 7348)
	WireGuard = 51871 // UDP: encrypted packets of pods between nodes
)

// Port is a port number of a transport protocol.
type Port struct {
	Proto  string // "tcp", "udp"
	Number uint16
}

// Default returns all ports on which an agent with default settings listens.
func Default() []Port {
	return []Port{{"tcp", HTTPS}, {"tcp", Health}, {"udp", VXLAN}, {"udp", WireGuard}}
}
