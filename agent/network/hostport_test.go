package network

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// F107: a host port leads to its pod from other machines, from the node itself and from the pod, in
// both families. It leads nowhere after the pod is removed.
func TestHostPorts(t *testing.T) {
	w := newWorld(t)
	r := w.keep("w1", never)
	w.has("w1", routesOfW1)
	served, _ := w.pod("w1", r, "served", &cri.PortMapping{ContainerPort: 8080, HostPort: 18080})
	var door net.Listener
	served.in(func() (err error) { door, err = net.Listen("tcp", "[::]:8080"); return err })
	t.Cleanup(func() { door.Close() })
	go func() {
		for {
			c, err := door.Accept()
			if err != nil {
				return
			}
			_, _ = io.WriteString(c, "here")
			c.Close()
		}
	}()
	ask := func(from *machine, at netip.Addr) (err error) {
		from.in(func() error {
			var c net.Conn
			if c, err = net.DialTimeout("tcp", netip.AddrPortFrom(at, 18080).String(), 20*time.Second); err != nil {
				return nil
			}
			defer c.Close()
			var got []byte
			if got, err = io.ReadAll(c); err == nil && string(got) != "here" {
				err = fmt.Errorf("it says %q", got)
			}
			return nil
		})
		return err
	}
	at := nodeOf("w1").Addresses
	if len(at) < 2 {
		t.Fatalf("the node has %v, and is to have both families", at)
	}
	from := map[string]*machine{"another node": w.nodes["w2"], "the node": w.nodes["w1"], "the pod": served}
	for _, ip := range at {
		for who, m := range from {
			if err := ask(m, ip); err != nil {
				t.Errorf("%s at %s: %v", who, ip, err)
			}
		}
	}
	w.detach["served"]()
	for _, ip := range at {
		if err := ask(w.nodes["w2"], ip); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("once the pod is gone, at %s: %v", ip, err)
		}
	}
}
