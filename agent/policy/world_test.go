package policy

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/fake"
	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/test/testenv/space"
)

// place is a machine of the test: a pod of the node, a pod of another node, or another host.
type place struct {
	name, namespace string
	labels          map[string]string
	ports           []NamedPort
	addresses       []netip.Addr // IPv4 first
	local           bool         // a pod of the node
	stranger        bool         // not a pod
	ns              netns.NsHandle
}

// nsLabels are the labels of the test's namespaces.
var nsLabels = map[string]map[string]string{"a": {"team": "x"}, "b": {"team": "y"}, "c": {"team": "x", "env": "prod"}}

func (p *place) uid() types.UID { return types.UID("uid-" + p.name) }

func (p *place) object() *v1.Pod {
	c := v1.Container{Name: "c"}
	for _, n := range p.ports {
		c.Ports = append(c.Ports, v1.ContainerPort{Name: n.Name, Protocol: v1.Protocol(strings.ToUpper(n.Proto)),
			ContainerPort: int32(n.Port)})
	}
	return &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: p.name, Namespace: p.namespace, UID: p.uid(),
		Labels: maps.Clone(p.labels)},
		Spec: v1.PodSpec{Containers: []v1.Container{c}}}
}

func (p *place) strings() []string {
	var out []string
	for _, a := range p.addresses {
		out = append(out, a.String())
	}
	return out
}

// peerSelects reports whether a peer with selectors matches the place, according to Kubernetes'
// documentation.
func peerSelects(policyNamespace string, peer *networkingv1.NetworkPolicyPeer, p *place) bool {
	if p.stranger {
		return false
	}
	if peer.NamespaceSelector == nil {
		if p.namespace != policyNamespace {
			return false
		}
	} else if !matches(peer.NamespaceSelector, nsLabels[p.namespace]) {
		return false
	}
	return peer.PodSelector == nil || matches(peer.PodSelector, p.labels)
}

func matches(s *metav1.LabelSelector, set map[string]string) bool {
	sel, err := metav1.LabelSelectorAsSelector(s)
	if err != nil {
		panic(err)
	}
	return sel.Matches(labels.Set(set))
}

// grouped sets the annotations that the control plane sets: one address group per peer with
// selectors. It returns the groups by name.
func grouped(p *networkingv1.NetworkPolicy, places []*place) (*networkingv1.NetworkPolicy, map[string]*v1.Endpoints) {
	p = p.DeepCopy()
	groups := map[string]*v1.Endpoints{}
	var names []string
	add := func(peers []networkingv1.NetworkPolicyPeer) {
		for i := range peers {
			if peers[i].IPBlock != nil {
				continue
			}
			own := ""
			if peers[i].NamespaceSelector == nil {
				own = p.Namespace
			}
			name := "group-of " + own + metav1.FormatLabelSelector(peers[i].NamespaceSelector) + "/" +
				metav1.FormatLabelSelector(peers[i].PodSelector)
			name = strings.NewReplacer(",", "+", "/", "|").Replace(name)
			names = append(names, name)
			g := &v1.Endpoints{ObjectMeta: metav1.ObjectMeta{Name: name}}
			for _, at := range places {
				if peerSelects(p.Namespace, &peers[i], at) {
					g.Subsets = append(g.Subsets, at.subset())
				}
			}
			groups[name] = g
		}
	}
	for i := range p.Spec.Ingress {
		add(p.Spec.Ingress[i].From)
	}
	for i := range p.Spec.Egress {
		add(p.Spec.Egress[i].To)
	}
	p.Annotations = map[string]string{agent.AddressGroups: strings.Join(names, ","),
		agent.NamedPortGroups: callers(p, places, groups)}
	return p, groups
}

// callers names a group for each named port of the policy's egress rules that allow destinations without selectors.
func callers(p *networkingv1.NetworkPolicy, places []*place, groups map[string]*v1.Endpoints) string {
	var out []string
	for _, r := range p.Spec.Egress {
		if len(r.To) > 0 && !slices.ContainsFunc(r.To, func(at networkingv1.NetworkPolicyPeer) bool {
			return at.IPBlock != nil
		}) {
			continue
		}
		for _, port := range r.Ports {
			if port.Port == nil || port.Port.Type != intstr.String {
				continue
			}
			want := NamedPort{Name: port.Port.StrVal, Proto: protocolName(ptr.Deref(port.Protocol, ""))}
			g := &v1.Endpoints{ObjectMeta: metav1.ObjectMeta{Name: "callers-of-" + want.Proto + "-" + want.Name}}
			for _, at := range places {
				if !at.stranger && slices.ContainsFunc(at.ports, func(n NamedPort) bool {
					return n.Name == want.Name && n.Proto == want.Proto
				}) {
					g.Subsets = append(g.Subsets, at.subset())
				}
			}
			groups[g.Name] = g
			out = append(out, want.Proto+"/"+want.Name+"="+g.Name)
		}
	}
	return strings.Join(out, ",")
}

func (p *place) subset() v1.EndpointSubset {
	var out v1.EndpointSubset
	for _, a := range p.addresses {
		out.Addresses = append(out.Addresses, v1.EndpointAddress{IP: a.String()})
	}
	for _, n := range p.ports {
		out.Ports = append(out.Ports, v1.EndpointPort{Name: n.Name, Port: int32(n.Port),
			Protocol: v1.Protocol(strings.ToUpper(n.Proto))})
	}
	return out
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// site is a node with a bridge and pods, and an outside network, all in namespaces.
type site struct {
	node    netns.NsHandle
	outside netns.NsHandle
	places  []*place
	gateway []netip.Addr
}

var testPorts = []int{80, 81, 8080}

func needsKernel(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root for network namespaces")
	}
	if _, err := exec.LookPath("nft"); err != nil {
		t.Skip("needs nft")
	}
	if _, err := os.Stat("/proc/sys/net/bridge/bridge-nf-call-iptables"); err != nil {
		t.Skip("needs br_netfilter")
	}
}

func newSite(t testing.TB, pods int) *site {
	t.Helper()
	s := &site{node: space.New(t), outside: space.New(t), gateway: addrs("10.88.0.1", "fd88::1")}
	must(t, space.In(s.node, func() error {
		for _, f := range []string{"/proc/sys/net/ipv4/ip_forward", "/proc/sys/net/ipv6/conf/all/forwarding"} {
			if err := os.WriteFile(f, []byte("1"), 0); err != nil {
				return err
			}
		}
		if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: bridge}}); err != nil {
			return err
		}
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "up"}, PeerName: "eth0",
			PeerNamespace: netlink.NsFd(int(s.outside))})
	}))
	configure(t, s.node, bridge, nil, "10.88.0.1/24", "fd88::1/64")
	configure(t, s.node, "up", nil, "10.89.0.1/24", "fd89::1/64")
	configure(t, s.outside, "eth0", addrs("10.89.0.1", "fd89::1"), "10.89.0.7/24", "fd89::7/64",
		"10.89.0.130/24", "fd89::82/64")
	serve(t, s.outside)
	serve(t, s.node)
	for i := range pods {
		p := &place{name: fmt.Sprint("p", i), local: true, ns: space.New(t),
			addresses: addrs(fmt.Sprintf("10.88.0.%d", 10+i), fmt.Sprintf("fd88::%x", 10+i))}
		s.attach(t, p)
		s.places = append(s.places, p)
	}
	s.places = append(s.places, &place{name: "far", ns: s.outside, addresses: addrs("10.89.0.7", "fd89::7")},
		&place{name: "alien", stranger: true, ns: s.outside, addresses: addrs("10.89.0.130", "fd89::82")})
	return s
}

// attach connects a pod to the bridge.
func (s *site) attach(t testing.TB, p *place) {
	t.Helper()
	must(t, space.In(s.node, func() error {
		br, err := netlink.LinkByName(bridge)
		if err != nil {
			return err
		}
		v := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "v" + p.name, MasterIndex: br.Attrs().Index},
			PeerName: "eth0", PeerNamespace: netlink.NsFd(int(p.ns))}
		if err := netlink.LinkAdd(v); err != nil {
			return err
		}
		if err := netlink.LinkSetHairpin(v, true); err != nil { // as in Keelson's own network configuration
			return err
		}
		return netlink.LinkSetUp(v)
	}))
	configure(t, p.ns, "eth0", s.gateway, p.addresses[0].String()+"/24", p.addresses[1].String()+"/64")
	serve(t, p.ns)
}

func addrs(in ...string) []netip.Addr {
	var out []netip.Addr
	for _, s := range in {
		out = append(out, netip.MustParseAddr(s))
	}
	return out
}

func configure(t testing.TB, ns netns.NsHandle, link string, gateways []netip.Addr, cidrs ...string) {
	t.Helper()
	must(t, space.In(ns, func() error {
		l, err := netlink.LinkByName(link)
		if err != nil {
			return err
		}
		if err := netlink.LinkSetUp(l); err != nil {
			return err
		}
		for _, c := range cidrs {
			a, err := netlink.ParseAddr(c)
			if err != nil {
				return err
			}
			if a.IP.To4() == nil {
				a.Flags = unix.IFA_F_NODAD
			}
			if err := netlink.AddrAdd(l, a); err != nil {
				return fmt.Errorf("%s: %w", c, err)
			}
		}
		for _, g := range gateways {
			if err := netlink.RouteAdd(&netlink.Route{Gw: net.IP(g.AsSlice())}); err != nil {
				return fmt.Errorf("route by %s: %w", g, err)
			}
		}
		return nil
	}))
}

// serve responds on every port of the test in a namespace, over TCP and UDP.
func serve(t testing.TB, ns netns.NsHandle) {
	t.Helper()
	for _, port := range testPorts {
		var ln net.Listener
		var udp *net.UDPConn
		must(t, space.In(ns, func() (err error) {
			if ln, err = net.Listen("tcp", fmt.Sprintf("[::]:%d", port)); err != nil {
				return err
			}
			return nil
		}))
		t.Cleanup(func() { ln.Close() })
		go func() {
			for {
				c, err := ln.Accept()
				if err != nil {
					return
				}
				go echo(c)
			}
		}()
		for _, network := range []string{"udp4", "udp6"} {
			must(t, space.In(ns, func() (err error) {
				udp, err = net.ListenUDP(network, &net.UDPAddr{Port: port})
				return err
			}))
			// The response must come from the requested address: a host with several addresses
			// would otherwise choose one.
			must(t, pktinfo(udp, network))
			t.Cleanup(func() { udp.Close() })
			go answer(udp)
		}
	}
}

func echo(c net.Conn) {
	defer c.Close()
	buf := make([]byte, 64)
	for {
		n, err := c.Read(buf)
		if err != nil {
			return
		}
		if _, err := c.Write(buf[:n]); err != nil {
			return
		}
	}
}

func pktinfo(c *net.UDPConn, network string) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var set error
	if err := raw.Control(func(fd uintptr) {
		if network == "udp4" {
			set = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_PKTINFO, 1)
		} else {
			set = unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO, 1)
		}
	}); err != nil {
		return err
	}
	return set
}

func answer(c *net.UDPConn) {
	buf, oob := make([]byte, 64), make([]byte, 128)
	for {
		n, on, _, from, err := c.ReadMsgUDPAddrPort(buf, oob)
		if err != nil {
			return
		}
		control := oob[:on]
		if msgs, err := unix.ParseSocketControlMessage(control); err == nil {
			for i := range msgs {
				if msgs[i].Header.Type == unix.IP_PKTINFO && msgs[i].Header.Level == unix.IPPROTO_IP {
					clear(msgs[i].Data[:4]) // through any interface
				}
				if msgs[i].Header.Type == unix.IPV6_PKTINFO && msgs[i].Header.Level == unix.IPPROTO_IPV6 {
					clear(msgs[i].Data[16:20])
				}
			}
		}
		_, _, _ = c.WriteMsgUDPAddrPort(buf[:n], control, from)
	}
}

// try is one attempt to reach a port.
type try struct {
	from, to *place // nil: the node itself
	client   netip.Addr
	server   netip.Addr
	proto    string
	port     int
	fd       int
}

func (a try) String() string {
	name := func(p *place) string {
		if p == nil {
			return "node"
		}
		return p.namespace + "/" + p.name
	}
	return fmt.Sprintf("%s %s -> %s %s %s/%d", name(a.from), a.client, name(a.to), a.server, a.proto, a.port)
}

// begin sends the first packet from the client's namespace, without waiting.
func (a *try) begin() error {
	domain, kind := unix.AF_INET, unix.SOCK_STREAM
	sockaddr := func(ip netip.Addr, port int) unix.Sockaddr { return &unix.SockaddrInet4{Port: port, Addr: ip.As4()} }
	if a.server.Is6() {
		domain = unix.AF_INET6
		sockaddr = func(ip netip.Addr, port int) unix.Sockaddr {
			return &unix.SockaddrInet6{Port: port, Addr: ip.As16()}
		}
	}
	if a.proto == "udp" {
		kind = unix.SOCK_DGRAM
	}
	var err error
	if a.fd, err = unix.Socket(domain, kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0); err != nil {
		return err
	}
	if a.client.IsValid() {
		if err := unix.Bind(a.fd, sockaddr(a.client, 0)); err != nil {
			return fmt.Errorf("%s: bind: %w", a, err)
		}
	}
	if err := unix.Connect(a.fd, sockaddr(a.server, a.port)); err != nil && err != unix.EINPROGRESS {
		return fmt.Errorf("%s: connect: %w", a, err)
	}
	if a.proto == "udp" {
		return a.send()
	}
	return nil
}

func (a *try) send() error {
	if _, err := unix.Write(a.fd, []byte("hello")); err != nil && err != unix.EPERM {
		return fmt.Errorf("%s: %w", a, err)
	}
	return nil
}

// reached reports whether a response arrives in time.
func (a *try) reached(within time.Duration) bool {
	events := int16(unix.POLLOUT)
	if a.proto == "udp" {
		events = unix.POLLIN
	}
	for deadline := time.Now().Add(within); ; {
		left := max(0, min(time.Until(deadline), time.Second))
		fds := []unix.PollFd{{Fd: int32(a.fd), Events: events}}
		n, err := unix.Poll(fds, int(left/time.Millisecond))
		if n > 0 {
			code, err := unix.GetsockoptInt(a.fd, unix.SOL_SOCKET, unix.SO_ERROR)
			return err == nil && code == 0 && fds[0].Revents&events != 0
		}
		if (err == nil || err == unix.EINTR) && time.Now().Before(deadline) {
			if a.proto == "udp" {
				_ = a.send()
			}
			continue
		}
		return false
	}
}

func (a *try) end() { unix.Close(a.fd) }

// patience is the maximum time for an expected packet to arrive, even on a loaded machine.
const patience = time.Minute

// rig is an enforcer that runs on a site.
type rig struct {
	*site
	cluster *fake.Cluster
	e       *Enforcer
	stop    func()
	off     atomic.Bool
	shown   map[string]bool // policies and groups in the cluster
	groups  map[string]bool
}

// sandboxes are those that ran before the enforcer.
type sandboxes map[types.UID][]string

func (s sandboxes) ListPodSandbox(context.Context, *cri.ListPodSandboxRequest) (*cri.ListPodSandboxResponse, error) {
	out := &cri.ListPodSandboxResponse{}
	for _, uid := range slices.Sorted(maps.Keys(s)) {
		out.Items = append(out.Items, &cri.PodSandbox{Id: string(uid), State: cri.PodSandboxState_SANDBOX_READY,
			Labels: map[string]string{agent.LabelPodUID: string(uid)}})
	}
	return out, nil
}

func (s sandboxes) PodSandboxStatus(_ context.Context, q *cri.PodSandboxStatusRequest) (
	*cri.PodSandboxStatusResponse, error,
) {
	ips := s[types.UID(q.PodSandboxId)]
	st := &cri.PodSandboxNetworkStatus{Ip: ips[0]}
	for _, ip := range ips[1:] {
		st.AdditionalIps = append(st.AdditionalIps, &cri.PodIP{Ip: ip})
	}
	return &cri.PodSandboxStatusResponse{Status: &cri.PodSandboxStatus{Network: st}}, nil
}

func newRig(s *site) *rig {
	return &rig{site: s, cluster: fake.NewCluster(), shown: map[string]bool{}, groups: map[string]bool{}}
}

// start runs an enforcer in the node's namespace.
func (r *rig) start(t testing.TB, before sandboxes) {
	t.Helper()
	r.e = New(Config{Objects: r.cluster, Sandboxes: before, Disabled: r.off.Load, Log: slog.New(slog.DiscardHandler)})
	r.e.interval = 20 * time.Millisecond
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- space.In(r.node, func() error { return r.e.Run(ctx) }) }()
	r.stop = func() {
		cancel()
		if err := <-done; err != nil && err != context.Canceled {
			t.Errorf("Run ended: %v", err)
		}
		r.stop = func() {}
	}
	t.Cleanup(func() { r.stop() })
}

// settle waits until the kernel reflects the state of the cluster.
func (r *rig) settle(t testing.TB) {
	t.Helper()
	revision := r.cluster.Revision()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for {
		r.e.mu.Lock()
		shown, moved, why := r.e.appliedVersion == r.e.wantedVersion && r.e.revision >= revision,
			r.e.progress, r.e.reason
		r.e.mu.Unlock()
		if shown {
			return
		}
		select {
		case <-moved:
		case <-ctx.Done():
			t.Fatalf("the kernel does not show revision %d: %s", revision, why)
		}
	}
}

// put makes the policies those of the cluster.
func (r *rig) put(policies ...*networkingv1.NetworkPolicy) {
	shown, groups := map[string]bool{}, map[string]bool{}
	for _, p := range policies {
		sent, has := grouped(p, r.places)
		for name, g := range has {
			groups[name] = true
			r.cluster.Put(g)
		}
		shown[p.Namespace+"/"+p.Name] = true
		r.cluster.Put(sent)
	}
	for key := range r.shown {
		if namespace, name, _ := strings.Cut(key, "/"); !shown[key] {
			r.cluster.Delete(&networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: namespace,
				Name: name}})
		}
	}
	for name := range r.groups {
		if !groups[name] {
			r.cluster.Delete(&v1.Endpoints{ObjectMeta: metav1.ObjectMeta{Name: name}})
		}
	}
	r.shown, r.groups = shown, groups
}

// putPods makes the local pods those of the node.
func (r *rig) putPods() {
	for _, p := range r.places {
		if p.local {
			r.cluster.Put(p.object())
		}
	}
}

// guard calls Guard for every local pod. It retries as the agent does if a busy machine has not
// written the rules in time.
func (r *rig) guard(t testing.TB) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for _, p := range r.places {
		if p.local {
			must(t, wait.For(ctx, time.Millisecond, func() error { return r.e.Guard(ctx, p.object(), p.strings()) }))
		}
	}
}
