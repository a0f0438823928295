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

// town are namespaces below that of the process, which is the node: two pods routed by the node, two ends of a plain veth,
// and two on a bridge. Each pair has a client and a server.
type town struct{ pods, veth, bridge [2]netns.NsHandle }

// inside runs f on a thread in a namespace, which is given up.
func inside(ns netns.NsHandle, f func() error) error {
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

// cable joins this namespace's end to another's, whose end is eth0 with an address and a gateway, if any.
func cable(to netns.NsHandle, name, ip, gateway string) error {
	if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: "eth0", PeerNamespace: netlink.NsFd(int(to))}); err != nil {
		return err
	}
	if err := up(name, ""); err != nil {
		return err
	}
	return inside(to, func() error {
		if err := up("lo", ""); err != nil {
			return err
		}
		if err := up("eth0", ip); err != nil || gateway == "" {
			return err
		}
		return netlink.RouteAdd(&netlink.Route{Gw: net.ParseIP(gateway)})
	})
}

func up(name, cidr string) error {
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

func newTown() (*town, error) {
	t := &town{}
	for _, pair := range []*[2]netns.NsHandle{&t.pods, &t.veth, &t.bridge} {
		for i := range pair {
			var err error
			if pair[i], err = newNamespace(); err != nil {
				return nil, err
			}
		}
	}
	for path, value := range map[string]string{"/proc/sys/net/ipv4/ip_forward": "1",
		"/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_close": "1"} { // connections of a measure are gone before the next
		if err := os.WriteFile(path, []byte(value), 0); err != nil {
			return nil, err
		}
	}
	steps := []func() error{
		func() error { return up("lo", nodeIP+"/32") },
		func() error { return cable(t.pods[0], "a", podA+"/30", "10.244.0.1") }, func() error { return up("a", "10.244.0.1/30") },
		func() error { return cable(t.pods[1], "b", podB+"/30", "10.244.0.5") }, func() error { return up("b", "10.244.0.5/30") },
		func() error {
			return netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br0"}})
		},
		func() error { return up("br0", "") },
		func() error { return cable(t.bridge[0], "p0", "10.91.0.1/24", "") }, func() error { return cable(t.bridge[1], "p1", "10.91.0.2/24", "") },
		func() error { return enslave("p0") }, func() error { return enslave("p1") },
		func() error {
			return inside(t.veth[0], func() error {
				if err := cable(t.veth[1], "eth0", "10.92.0.2/24", ""); err != nil {
					return err
				}
				return up("eth0", "10.92.0.1/24")
			})
		},
		func() error { return serve(t.pods[1]) }, func() error { return serve(t.veth[1]) }, func() error { return serve(t.bridge[1]) },
	}
	for i, do := range steps {
		if err := do(); err != nil {
			return nil, fmt.Errorf("step %d: %w", i, err)
		}
	}
	return t, nil
}

func enslave(name string) error {
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

// serve swallows what comes at port 8081, and ends connections to 8080.
func serve(ns netns.NsHandle) error {
	for port, do := range map[string]func(net.Conn){"8080": func(net.Conn) {}, "8081": func(c net.Conn) {
		buf := make([]byte, 128<<10)
		for {
			if _, err := c.Read(buf); err != nil {
				return
			}
		}
	}} {
		var ln net.Listener
		if err := inside(ns, func() (err error) { ln, err = net.Listen("tcp4", "0.0.0.0:"+port); return err }); err != nil {
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

// backend is the slice of the Service that is measured.
func (t *town) backend() *discoveryv1.EndpointSlice {
	s := sliceOf(0, 0)
	name, port, proto, node, yes := "sink", int32(8081), v1.ProtocolTCP, "w1", true
	s.Ports = append(s.Ports, discoveryv1.EndpointPort{Name: &name, Port: &port, Protocol: &proto})
	s.Endpoints = []discoveryv1.Endpoint{{Addresses: []string{podB}, NodeName: &node, Conditions: discoveryv1.EndpointConditions{Ready: &yes, Serving: &yes}}}
	return s
}

// turn is how long each way is used at a time: short, so that what else the machine does meets all ways alike.
const turn = 100 * time.Millisecond

// processor is the time of it that this process has used: client, server and the kernel's work between them.
func processor() time.Duration {
	var u unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// way is where a client is, the addresses at which a server ends connections and swallows what comes, and the ways that it is
// compared with.
type way struct {
	name            string
	from            netns.NsHandle
	connect, stream string
	beside          []string
}

// toPod and toService are the ways of a town's client.
func (t *town) toPod(name string, beside ...string) way {
	return way{name, t.pods[0], podB + ":8080", podB + ":8081", beside}
}

func (t *town) toService(name string, beside ...string) way {
	return way{name, t.pods[0], serviceIP + ":80", serviceIP + ":81", beside}
}

// references are what the way from pod to pod is compared with: a plain veth and a bridge.
func (t *town) references() []way {
	return []way{{"veth", t.veth[0], "10.92.0.2:8080", "10.92.0.2:8081", nil}, {"bridge", t.bridge[0], "10.91.0.2:8080", "10.91.0.2:8081", nil}}
}

// measure takes the ways in turn, round by round and every other round backwards, so that what else the machine does meets all
// of them. Of each way the median counts, and of two that are compared the median of what the rounds say: what slows down or
// speeds up some rounds changes the former, and hardly the latter.
func measure(out map[string]float64, ways []way, rounds int) error {
	samples := map[string][]float64{}
	for range rounds {
		slices.Reverse(ways)
		for _, w := range ways {
			for _, m := range []struct {
				name, to string
				do       func(netns.NsHandle, string, time.Duration) (float64, error)
			}{{"connect_", w.connect, connections}, {"stream_", w.stream, stream}} {
				before := processor()
				n, err := m.do(w.from, m.to, turn)
				if err != nil {
					return fmt.Errorf("%s%s: %w", m.name, w.name, err)
				}
				samples[m.name+w.name] = append(samples[m.name+w.name], n/turn.Seconds())
				samples[m.name+"cpu_"+w.name] = append(samples[m.name+"cpu_"+w.name], float64((processor()-before).Nanoseconds())/1e3/n)
			}
		}
	}
	for _, w := range ways {
		for _, m := range []string{"connect_", "connect_cpu_", "stream_", "stream_cpu_"} {
			for _, other := range w.beside {
				var ratios []float64
				for i, s := range samples[m+w.name] {
					ratios = append(ratios, s/samples[m+other][i])
				}
				out[beside(m+w.name, m+other)] = figures.Quantile(ratios, 0.5)
			}
		}
	}
	for name, s := range samples {
		out[name] = figures.Quantile(s, 0.5)
	}
	return nil
}

// beside is what the ratio of two measures is called.
func beside(name, other string) string { return name + "/" + other }

// paired is a row of a measure beside another that was taken in turn with it.
func paired(v map[string]float64, params, name, key, unit, figure, other string) figures.Row {
	return figures.Row{Measure: name, Params: params, Key: key, Unit: unit, Figure: v[figure],
		Reference: &figures.Reference{Figure: v[other], Paired: v[beside(figure, other)]}}
}

// connections opens one after the other, each until the server has ended it, and says how many.
func connections(from netns.NsHandle, to string, during time.Duration) (n float64, err error) {
	err = inside(from, func() error {
		begin, one := time.Now(), make([]byte, 1)
		for time.Since(begin) < during {
			c, err := net.DialTimeout("tcp4", to, 5*time.Second)
			if err != nil {
				return err
			}
			if _, err := c.Read(one); err != io.EOF {
				c.Close()
				return fmt.Errorf("want the end: %w", err)
			}
			_ = c.(*net.TCPConn).SetLinger(0) // no port waits for stragglers
			c.Close()
			n++
		}
		n *= during.Seconds() / time.Since(begin).Seconds()
		return nil
	})
	return n, err
}

// stream sends as fast as it can, and says how many MiB.
func stream(from netns.NsHandle, to string, during time.Duration) (sent float64, err error) {
	err = inside(from, func() error {
		c, err := net.DialTimeout("tcp4", to, 5*time.Second)
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
