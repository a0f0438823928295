package network

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"keelson.dev/keelson/internal/wait"
)

// tunnelled returns the VXLAN packet in which one node's end of the tunnel sends a datagram of a pod to another node.
func tunnelled(from, to string, pod, target netip.Addr, text string) []byte {
	inner := udpPacket(pod, target, text)
	binary.BigEndian.PutUint16(inner[22:], 7000)
	return append([]byte{8, 0, 0, 0, 0, 0, tunnelVNI, 0},
		ethernet(HardwareAddr(to), HardwareAddr(from), unix.ETH_P_IP, inner)...)
}

// F108: a pod cannot send with the address of a pod on another node by sending VXLAN packets
// itself, neither to its own node nor to another one.
func TestPodsCannotUseTheTunnel(t *testing.T) {
	w := newWorld(t)
	r1, r3 := w.keep("w1", never), w.keep("w3", never)
	for _, name := range []string{"w1", "w3"} {
		w.eventually(name, func() error {
			if got := w.nodes[name].ours(); !strings.Contains(got, "tunnel") {
				return errors.New(got)
			}
			return nil
		})
	}
	attacker, sn := w.pod("w1", r1, "attacker") // the victim on the attacker's node
	far, sf := w.pod("w3", r3, "far")
	nearIP, farIP := netip.MustParseAddr(sn.IPs[0]), netip.MustParseAddr(sf.IPs[0])
	for _, c := range []struct {
		name   string
		node   string // the node that receives the packet
		packet []byte
		victim *machine
		at     netip.Addr
	}{
		{"its own node", "10.89.0.101", tunnelled("w3", "w1", farIP, nearIP, "spoofed"), attacker, nearIP},
		{"another node", "10.89.1.103", tunnelled("w1", "w3", nearIP, farIP, "spoofed"), far, farIP},
	} {
		listener := c.victim.listen(c.at)
		send := func(to string, what []byte) {
			attacker.in(func() error {
				out, err := net.Dial("udp4", to)
				if err != nil {
					return err
				}
				defer out.Close()
				_, err = out.Write(what)
				return err
			})
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		err := wait.For(ctx, 10*time.Millisecond, func() error {
			send(net.JoinHostPort(c.node, fmt.Sprint(tunnelPort)), c.packet)
			send(net.JoinHostPort(c.at.String(), "7000"), []byte("as itself"))
			_ = listener.SetReadDeadline(time.Now().Add(time.Second))
			buffer := make([]byte, 64)
			for seen := 0; seen < 3; seen++ { // several regular datagrams, and none of the forged packets
				n, peer, err := listener.ReadFromUDPAddrPort(buffer)
				if err != nil {
					return err
				}
				if string(buffer[:n]) == "spoofed" {
					t.Errorf("%s: a pod sends as %s by the tunnel", c.name, peer)
					return nil
				}
				send(net.JoinHostPort(c.node, fmt.Sprint(tunnelPort)), c.packet)
				send(net.JoinHostPort(c.at.String(), "7000"), []byte("as itself"))
			}
			return nil
		})
		cancel()
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
		listener.Close()
	}
}
