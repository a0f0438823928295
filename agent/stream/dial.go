package stream

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"time"

	"k8s.io/apimachinery/pkg/types"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
)

// dialTimeout is the maximum time for connecting to a pod of this node.
const dialTimeout = 10 * time.Second

// Dial connects to a port at an address of a pod of this node, or of the node itself if pod is
// empty. It refuses all other addresses. It implements agent.NodeServer.
func (s *Server) Dial(ctx context.Context, pod types.UID, address string, port int32) (net.Conn, error) {
	addr, err := netip.ParseAddr(address)
	if err != nil || port <= 0 || port > 65535 {
		return nil, fmt.Errorf("address %q, port %d: invalid address or port", address, port)
	}
	addr = addr.Unmap()
	if addr.IsLoopback() || addr.IsUnspecified() || addr.IsMulticast() || addr.IsLinkLocalUnicast() {
		return nil, fmt.Errorf("address %s: this agent dials addresses of pods and of the node only", addr)
	}
	if err := s.checkAddress(ctx, pod, addr); err != nil {
		return nil, err
	}
	d := net.Dialer{Timeout: dialTimeout}
	return d.DialContext(ctx, "tcp", net.JoinHostPort(addr.String(), strconv.Itoa(int(port))))
}

// checkAddress returns an error unless addr is an address of the pod, or of this node if pod is "".
func (s *Server) checkAddress(ctx context.Context, pod types.UID, addr netip.Addr) error {
	if pod == "" {
		return checkNodeAddress(addr)
	}
	res, err := s.runtime.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{
		Filter: &cri.PodSandboxFilter{LabelSelector: map[string]string{agent.LabelPodUID: string(pod)}}})
	if err != nil {
		return fmt.Errorf("looking for the sandbox of pod %s: %w", pod, err)
	}
	for _, sb := range res.Items {
		if sb.State != cri.PodSandboxState_SANDBOX_READY {
			continue
		}
		st, err := s.runtime.PodSandboxStatus(ctx, &cri.PodSandboxStatusRequest{PodSandboxId: sb.Id})
		if err != nil {
			return fmt.Errorf("looking for the addresses of pod %s: %w", pod, err)
		}
		if st.GetStatus().GetLinux().GetNamespaces().GetOptions().GetNetwork() == cri.NamespaceMode_NODE {
			return checkNodeAddress(addr)
		}
		ips := []string{st.GetStatus().GetNetwork().GetIp()}
		for _, more := range st.GetStatus().GetNetwork().GetAdditionalIps() {
			ips = append(ips, more.GetIp())
		}
		for _, ip := range ips {
			if have, err := netip.ParseAddr(ip); err == nil && have.Unmap() == addr {
				return nil
			}
		}
		return fmt.Errorf("address %s does not belong to pod %s", addr, pod)
	}
	return fmt.Errorf("pod %s has no running sandbox", pod)
}

func checkNodeAddress(addr netip.Addr) error {
	all, err := net.InterfaceAddrs()
	if err != nil {
		return fmt.Errorf("looking for the addresses of this node: %w", err)
	}
	for _, a := range all {
		if n, ok := a.(*net.IPNet); ok {
			if have, ok := netip.AddrFromSlice(n.IP); ok && have.Unmap() == addr {
				return nil
			}
		}
	}
	return fmt.Errorf("address %s does not belong to this node", addr)
}
