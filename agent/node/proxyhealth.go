package node

import (
	"fmt"
	"net"
	"net/netip"
	"strconv"
)

// proxyHealthzPort is the default port of the health check for external load balancers, as in
// kube-proxy.
const proxyHealthzPort = 10256

// healthzAddress validates the value of the flag --proxy-healthz-address and returns the address.
// "" means that the health check is disabled.
func healthzAddress(text string) (string, error) {
	if text == "" || text == "none" {
		return "", nil
	}
	host, port, err := net.SplitHostPort(text)
	if err == nil && host != "" {
		_, err = netip.ParseAddr(host)
	}
	if n, e := strconv.ParseUint(port, 10, 16); err != nil || e != nil || n == 0 {
		return "",
			fmt.Errorf("--proxy-healthz-address %q: want an address of the node and a port, such as 192.0.2.7:10256, "+
				":10256 for all addresses, or none", text)
	}
	return text, nil
}
