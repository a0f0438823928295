package main

import (
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
	discoveryv1 "k8s.io/api/discovery/v1"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/test/bench/figures"
)

const (
	nodeIP    = "10.89.0.101"
	serviceIP = "10.96.255.10"
	podA      = "10.244.0.2"
	podB      = "10.244.0.6"
)

// nodeNetwork is a set of network namespaces connected to the current namespace, which acts as the
// node. It has two pods routed by the node, the two ends of a plain veth, and two namespaces on a
// bridge. Each pair is a client and a server.
type nodeNetwork struct{ pods, veth, bridge [2]netns.NsHandle }

// runInNamespace runs f on an OS thread in the network namespace ns, and returns its error. The
// thread ends afterwards.
func runInNamespace(ns netns.NsHandle, f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if err := netns.Set(ns); err != nil {
			done <- err
			return
		}
		done <- f()
	}()
	return <-done
}

func newNamespace() (ns netns.NsHandle, err error) {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		ns, err = netns.New()
		done <- err
	}()
	return ns, <-done
}

// connectVeth creates a veth pair between this namespace and peer. The peer's end is eth0, with the
// address ip and, unless it is empty, the default gateway. name is the name of this end.
func connectVeth(peer netns.NsHandle, name, ip, gateway string) error {
	if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: "eth0",
		PeerNamespace: netlink.NsFd(int(peer))}); err != nil {
		return err
	}
	if err := setLinkUp(name, ""); err != nil {
		return err
	}
	return runInNamespace(peer, func() error {
		if err := setLinkUp("lo", ""); err != nil {
			return err
		}
		if err := setLinkUp("eth0", ip); err != nil || gateway == "" {
			return err
		}
		return netlink.RouteAdd(&netlink.Route{Gw: net.ParseIP(gateway)})
	})
}

func setLinkUp(name, cidr string) error {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	if cidr != "" {
		a, err := netlink.ParseAddr(cidr)
		if err != nil {
			return err
		}
		if err := netlink.AddrAdd(l, a); err != nil {
			return err
		}
	}
	return netlink.LinkSetUp(l)
}

func newNodeNetwork() (*nodeNetwork, error) {
	t := &nodeNetwork{}
	for _, pair := range []*[2]netns.NsHandle{&t.pods, &t.veth, &t.bridge} {
		for i := range pair {
			var err error
			if pair[i], err = newNamespace(); err != nil {
				return nil, err
			}
		}
	}
	for path, value := range map[string]string{"/proc/sys/net/ipv4/ip_forward": "1",
		"/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_close": "1"} { // closed connections expire soon
		if err := os.WriteFile(path, []byte(value), 0); err != nil {
			return nil, err
		}
	}
	steps := []func() error{
		func() error { return setLinkUp("lo", nodeIP+"/32") },
		func() error {
			return connectVeth(t.pods[0], "a", podA+"/30", "10.244.0.1")
		}, func() error { return setLinkUp("a", "10.244.0.1/30") },
		func() error {
			return connectVeth(t.pods[1], "b", podB+"/30", "10.244.0.5")
		}, func() error { return setLinkUp("b", "10.244.0.5/30") },
		func() error {
			return netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br0"}})
		},
		func() error { return setLinkUp("br0", "") },
		func() error {
			return connectVeth(t.bridge[0], "p0", "10.91.0.1/24", "")
		}, func() error { return connectVeth(t.bridge[1], "p1", "10.91.0.2/24", "") },
		func() error { return attachToBridge("p0") }, func() error { return attachToBridge("p1") },
		func() error {
			return runInNamespace(t.veth[0], func() error {
				if err := connectVeth(t.veth[1], "eth0", "10.92.0.2/24", ""); err != nil {
					return err
				}
				return setLinkUp("eth0", "10.92.0.1/24")
			})
		},
		func() error {
			return serveTraffic(t.pods[1])
		}, func() error { return serveTraffic(t.veth[1]) }, func() error { return serveTraffic(t.bridge[1]) },
	}
	for i, do := range steps {
		if err := do(); err != nil {
			return nil, fmt.Errorf("step %d of the network setup: %w", i, err)
		}
	}
	return t, nil
}

func attachToBridge(name string) error {
	bridge, err := netlink.LinkByName("br0")
	if err != nil {
		return err
	}
	l, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	return netlink.LinkSetMaster(l, bridge)
}

// serveTraffic discards the data received at port 8081, and closes connections to port 8080 at
// once.
func serveTraffic(ns netns.NsHandle) error {
	for port, do := range map[string]func(net.Conn){"8080": func(net.Conn) {}, "8081": func(c net.Conn) {
		buf := make([]byte, 128<<10)
		for {
			if _, err := c.Read(buf); err != nil {
				return
			}
		}
	}} {
		var ln net.Listener
		if err := runInNamespace(ns, func() (err error) {
			ln, err = net.Listen("tcp4", "0.0.0.0:"+port)
			return err
		}); err != nil {
			return err
		}
		go func() {
			for {
				c, err := ln.Accept()
				if err != nil {
					return
				}
				go func() {
					defer c.Close()
					do(c)
				}()
			}
		}()
	}
	return nil
}

// newBackendSlice returns the EndpointSlice of the measured Service.
func (t *nodeNetwork) newBackendSlice() *discoveryv1.EndpointSlice {
	s := newEndpointSlice(0, 0)
	name, port, proto, node, yes := "sink", int32(8081), v1.ProtocolTCP, "w1", true
	s.Ports = append(s.Ports, discoveryv1.EndpointPort{Name: &name, Port: &port, Protocol: &proto})
	s.Endpoints = []discoveryv1.Endpoint{{Addresses: []string{podB}, NodeName: &node,
		Conditions: discoveryv1.EndpointConditions{Ready: &yes, Serving: &yes}}}
	return s
}

// turnDuration is the time for which each path is used in a round. It is short, so that other work
// on the machine affects all paths alike.
const turnDuration = 100 * time.Millisecond

// processCPUTime returns the CPU time of this process: client, server, and the kernel's work
// between them.
func processCPUTime() time.Duration {
	var u unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// trafficPath is a path of traffic to measure: the client's namespace, the addresses of the closing
// and of the discarding server, and the names of the paths with which it is compared.
type trafficPath struct {
	name            string
	from            netns.NsHandle
	connect, stream string
	beside          []string
}

// pathToPod and pathToService return the paths from the client pod to the server pod: to its own
// address, and through a Service. beside are the names of the paths with which the path is
// compared.
func (t *nodeNetwork) pathToPod(name string, beside ...string) trafficPath {
	return trafficPath{name, t.pods[0], podB + ":8080", podB + ":8081", beside}
}

func (t *nodeNetwork) pathToService(name string, beside ...string) trafficPath {
	return trafficPath{name, t.pods[0], serviceIP + ":80", serviceIP + ":81", beside}
}

// referencePaths returns the paths with which pod-to-pod traffic is compared: a plain veth and a
// bridge.
func (t *nodeNetwork) referencePaths() []trafficPath {
	return []trafficPath{{"veth", t.veth[0], "10.92.0.2:8080", "10.92.0.2:8081", nil},
		{"bridge", t.bridge[0], "10.91.0.2:8080", "10.91.0.2:8081", nil}}
}

// measurePaths measures the paths in turn in each round, in reverse order every other round, so
// that other work affects all of them. A value in out is the median of the rounds. A ratio of two
// paths is the median of the rounds' ratios, which is more robust against noise that affects some
// rounds.
func measurePaths(out map[string]float64, paths []trafficPath, rounds int) error {
	samples := map[string][]float64{}
	for range rounds {
		slices.Reverse(paths)
		for _, w := range paths {
			for _, m := range []struct {
				name, to string
				do       func(netns.NsHandle, string, time.Duration) (float64, error)
			}{{"connect_", w.connect, countConnections}, {"stream_", w.stream, sendStream}} {
				before := processCPUTime()
				n, err := m.do(w.from, m.to, turnDuration)
				if err != nil {
					return fmt.Errorf("%s%s: %w", m.name, w.name, err)
				}
				samples[m.name+w.name] = append(samples[m.name+w.name], n/turnDuration.Seconds())
				samples[m.name+"cpu_"+w.name] = append(samples[m.name+"cpu_"+w.name],
					float64((processCPUTime()-before).Nanoseconds())/1e3/n)
			}
		}
	}
	for _, w := range paths {
		for _, m := range []string{"connect_", "connect_cpu_", "stream_", "stream_cpu_"} {
			for _, other := range w.beside {
				var ratios []float64
				for i, s := range samples[m+w.name] {
					ratios = append(ratios, s/samples[m+other][i])
				}
				out[ratioName(m+w.name, m+other)] = figures.Quantile(ratios, 0.5)
			}
		}
	}
	for name, s := range samples {
		out[name] = figures.Quantile(s, 0.5)
	}
	return nil
}

// ratioName returns the name of the ratio of two measurements.
func ratioName(name, other string) string { return name + "/" + other }

// pairedRow returns the row of a measurement compared with another that was measured in turn with
// it.
func pairedRow(v map[string]float64, params, name, key, unit, figure, other string) figures.Row {
	return figures.Row{Measure: name, Params: params, Key: key, Unit: unit, Figure: v[figure],
		Reference: &figures.Reference{Figure: v[other], Paired: v[ratioName(figure, other)]}}
}

// countConnections opens connections from a namespace to the address target, one after the other,
// each until the server has closed it. It returns their number, scaled to the time during.
func countConnections(client netns.NsHandle, target string, during time.Duration) (n float64, err error) {
	err = runInNamespace(client, func() error {
		begin, one := time.Now(), make([]byte, 1)
		for time.Since(begin) < during {
			c, err := net.DialTimeout("tcp4", target, 5*time.Second)
			if err != nil {
				return err
			}
			if _, err := c.Read(one); err != io.EOF {
				c.Close()
				return fmt.Errorf("want EOF from the server: %w", err)
			}
			_ = c.(*net.TCPConn).SetLinger(0) // reset, so that the port is not kept in TIME_WAIT
			c.Close()
			n++
		}
		n *= during.Seconds() / time.Since(begin).Seconds()
		return nil
	})
	return n, err
}

// sendStream sends data from a namespace to the address target, as fast as possible. It returns the
// MiB sent, scaled to the time during.
func sendStream(client netns.NsHandle, target string, during time.Duration) (sent float64, err error) {
	err = runInNamespace(client, func() error {
		c, err := net.DialTimeout("tcp4", target, 5*time.Second)
		if err != nil {
			return err
		}
		defer c.Close()
		buf, begin := make([]byte, 128<<10), time.Now()
		for time.Since(begin) < during {
			n, err := c.Write(buf)
			if err != nil {
				return err
			}
			sent += float64(n) / (1 << 20)
		}
		sent *= during.Seconds() / time.Since(begin).Seconds()
		return nil
	})
	return sent, err
}
