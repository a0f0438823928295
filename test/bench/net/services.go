package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"syscall"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/agent/fake"
	"keelson.dev/keelson/agent/proxy"
	"keelson.dev/keelson/agent/proxy/servicemodel"
	"keelson.dev/keelson/test/bench/figures"
)

// endpointsPerService is the number of endpoints of each Service.
const endpointsPerService = 5

// benchServices measures each number of Services in its own process and network namespace, and
// prints a table.
func benchServices(ctx context.Context, args []string) error {
	fs := flag.NewFlagSet("services", flag.ContinueOnError)
	path := fs.String("json", "bench.json", "write JSON lines to this file")
	mode := fs.String("mode", "nftables", "mode of the rules: nftables or iptables")
	rounds := fs.Int("rounds", 60,
		"rounds of each traffic measurement, 0.1 s each; figures are medians of the rounds")
	sizes := fs.String("sizes", "10,1000,10000",
		"numbers of Services, with 5 endpoints each; traffic is measured with the first and the last number")
	err := fs.Parse(args)
	if err != nil {
		return err
	}
	var records []figures.Record
	all := strings.Split(*sizes, ",")
	for i, size := range all {
		fmt.Fprintf(os.Stderr, "%s Services in mode %s\n", size, *mode)
		r := figures.Record{Measure: "services",
			Params: map[string]any{"services": size, "endpoints each": endpointsPerService, "mode": *mode}}
		if r.Values, err = runAsNode(ctx, "services-node", "-mode", *mode, "-services", size,
			fmt.Sprint("-rounds=", *rounds),
			fmt.Sprint("-traffic=", i == 0 || i == len(all)-1)); err != nil {
			return fmt.Errorf("%s Services: %w", size, err)
		}
		records = append(records, r)
	}
	if err := appendRecords(*path, records); err != nil {
		return err
	}
	return figures.Compare(os.Stdout, serviceRows(records), "reference")
}

// runAsNode runs a command of this program in a new network namespace and returns the values that
// it prints. It needs root.
func runAsNode(ctx context.Context, args ...string) (values map[string]float64, err error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, self, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%w: root is required for network namespaces, and nft for the rules", err)
	}
	return values, json.Unmarshal(out, &values)
}

func appendRecords(path string, records []figures.Record) error {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return err
	}
	if err := figures.WriteLines(file, records); err != nil {
		file.Close()
		return err
	}
	return file.Close()
}

// serviceRows returns the rows of the table for the records of all measurements.
func serviceRows(records []figures.Record) []figures.Row {
	var rows []figures.Row
	for _, r := range records {
		v := r.Values
		head := fmt.Sprintf("%v Services with %d endpoints each, mode %v", r.Params["services"], endpointsPerService,
			r.Params["mode"])
		alone := func(name, key, unit, figure string) {
			rows = append(rows, figures.Row{Measure: name, Params: head, Key: key, Unit: unit, Figure: v[figure]})
		}
		alone("first write of all rules", "services full sync", "ms", "sync_ms")
		alone("one change, until its revision is confirmed: median", "services change p50", "ms", "change_p50_ms")
		alone("one change: p99", "services change p99", "ms", "change_p99_ms")
		alone("memory for objects, model and writing", "services memory", "MiB", "memory_MiB")
		if v["stream_pod"] == 0 {
			continue
		}
		row := func(name, key, unit, figure, other string) {
			rows = append(rows, pairedRow(v, head, name, key, unit, figure, other))
		}
		row("stream pod to Service, compared with pod to pod", "services stream", "MiB/s",
			"stream_service", "stream_pod")
		row("stream pod to pod, compared with a plain veth", "", "MiB/s", "stream_pod", "stream_veth")
		row("stream pod to pod, compared with a bridge", "", "MiB/s", "stream_pod", "stream_bridge")
		row("CPU time of a MiB to a Service, compared with pod to pod", "services stream cpu", "µs",
			"stream_cpu_service", "stream_cpu_pod")
		row("CPU time of a MiB to a Service, compared with a node with few", "services many cpu", "µs",
			"stream_cpu_service", "stream_cpu_few")
		row("connections pod to Service, compared with pod to pod", "services connections", "/s",
			"connect_service", "connect_pod")
		row("connections pod to pod, compared with a plain veth", "", "/s", "connect_pod", "connect_veth")
		row("connections pod to pod, compared with a bridge", "", "/s", "connect_pod", "connect_bridge")
		row("CPU time of a connection to a Service, compared with pod to pod", "services connections cpu", "µs",
			"connect_cpu_service", "connect_cpu_pod")
		row("CPU time of a connection to a Service, compared with a node with few", "services many cpu", "µs",
			"connect_cpu_service", "connect_cpu_few")
		row("stream to a Service, compared with a node with few Services", "services many", "MiB/s",
			"stream_service", "stream_few")
		row("connections to a Service, compared with a node with few", "services many", "/s",
			"connect_service", "connect_few")
	}
	return rows
}

// proxyObserver records the last revision that the proxy has applied.
type proxyObserver struct {
	*cluster
	mu   sync.Mutex
	cond *sync.Cond
	last uint64
}

type cluster = fake.Cluster

func (w *proxyObserver) ProxyApplied(revision uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.last = revision
	w.cond.Broadcast()
}

func (w *proxyObserver) awaitRevision(revision uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for w.last < revision {
		w.cond.Wait()
	}
}

// servicesNode simulates a node in the network namespace of this process. It prints the measured
// values as JSON.
func servicesNode(ctx context.Context, args []string) error {
	fs := flag.NewFlagSet("services-node", flag.ContinueOnError)
	n := fs.Int("services", 10, "")
	rounds := fs.Int("rounds", 5, "")
	traffic := fs.Bool("traffic", false, "")
	name := fs.String("mode", "nftables", "")
	if err := fs.Parse(args); err != nil {
		return err
	}
	mode, err := proxy.ParseMode(*name)
	if err != nil {
		return err
	}
	out := map[string]float64{}
	t, err := newNodeNetwork()
	if err != nil {
		return fmt.Errorf("creating network namespaces: %w", err)
	}
	before := settledMemory()
	objects := &proxyObserver{cluster: fake.NewCluster()}
	objects.cond = sync.NewCond(&objects.mu)
	objects.About.ServiceCIDR, objects.About.ClusterCIDR = "10.96.0.0/12", "10.244.0.0/14"
	for i := range *n {
		objects.Put(newService(i), newEndpointSlice(i, 0))
	}
	objects.Put(newService(0), t.newBackendSlice())
	p := &proxy.Proxy{Node: "w1", NodeIP: netip.MustParseAddr(nodeIP), Mode: mode, Log: slog.New(slog.DiscardHandler)}
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	peak := watchMemory(ctx)
	begin := time.Now()
	go func() { ended <- p.Run(ctx, objects, objects); cancel(); objects.ProxyApplied(^uint64(0)) }()
	objects.awaitRevision(objects.Revision())
	out["sync_ms"] = float64(time.Since(begin).Microseconds()) / 1e3
	var took []time.Duration
	for i := range 200 {
		which := 1 + i%(*n-1)
		begin := time.Now()
		objects.Put(newEndpointSlice(which, 1+i/(*n-1)))
		objects.awaitRevision(objects.Revision())
		took = append(took, time.Since(begin))
	}
	out["change_p50_ms"] = figures.Quantile(took, 0.5) / 1e6
	out["change_p99_ms"] = figures.Quantile(took, 0.99) / 1e6
	out["memory_MiB"] = (peak() - before) / (1 << 20)
	if ctx.Err() != nil {
		return <-ended
	}
	if *traffic {
		few, err := newNodeWithFewServices(ctx, mode)
		if err != nil {
			return fmt.Errorf("creating a node with few Services: %w", err)
		}
		if err := measurePaths(out, append([]trafficPath{t.pathToPod("pod", "veth", "bridge"),
			t.pathToService("service", "pod", "few"),
			few.pathToService("few")}, t.referencePaths()...), *rounds); err != nil {
			return err
		}
	}
	cancel()
	<-ended
	return json.NewEncoder(os.Stdout).Encode(out)
}

// newNodeWithFewServices simulates another node with ten Services in a new network namespace.
func newNodeWithFewServices(ctx context.Context, mode proxy.Mode) (t *nodeNetwork, err error) {
	node, err := newNamespace()
	if err != nil {
		return nil, err
	}
	err = runInNamespace(node, func() (err error) {
		if t, err = newNodeNetwork(); err != nil {
			return err
		}
		return t.writeFewServices(ctx, mode)
	})
	return t, err
}

// writeFewServices writes the rules of ten Services. One of them has the network's server pod as
// its endpoint.
func (t *nodeNetwork) writeFewServices(ctx context.Context, mode proxy.Mode) error {
	services, parts := []*v1.Service{newService(0)}, []*discoveryv1.EndpointSlice{t.newBackendSlice()}
	for i := 1; i < 10; i++ {
		services, parts = append(services, newService(i)), append(parts, newEndpointSlice(i, 0))
	}
	w, err := proxy.NewWriter(mode)
	if err != nil {
		return err
	}
	base := proxy.Base{ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/12")},
		PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/14")}}
	return w.Sync(ctx, base,
		maps.Values(servicemodel.Compute(services, parts, servicemodel.Location{Node: "w1"}).Ports()))
}

// settledMemory returns the bytes that this process has from the operating system, after a garbage
// collection and after returning free memory.
func settledMemory() float64 {
	runtime.GC()
	debug.FreeOSMemory()
	return memoryInUse()
}

func memoryInUse() float64 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return float64(m.Sys - m.HeapReleased)
}

// watchMemory samples the memory in use until ctx ends. The returned function returns the highest
// value so far, in bytes.
func watchMemory(ctx context.Context) func() float64 {
	var mu sync.Mutex
	most := memoryInUse()
	look := func() float64 {
		now := memoryInUse()
		mu.Lock()
		defer mu.Unlock()
		most = max(most, now)
		return most
	}
	go func() {
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				look()
			case <-ctx.Done():
				return
			}
		}
	}()
	return look
}

func newObjectMeta(i int) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprintf("service-%d", i), ResourceVersion: "1"}
}

func newService(i int) *v1.Service {
	s := &v1.Service{ObjectMeta: newObjectMeta(i)}
	s.Spec.ClusterIP = netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)}).String()
	s.Spec.Ports = []v1.ServicePort{{Name: "http", Port: 80, Protocol: v1.ProtocolTCP}}
	if i == 0 {
		s.Spec.ClusterIP = serviceIP
		s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: "sink", Port: 81, Protocol: v1.ProtocolTCP})
	}
	return s
}

// newEndpointSlice returns the EndpointSlice of the i-th Service, with endpoints on another node.
// Even and odd rounds have different endpoints.
func newEndpointSlice(i, round int) *discoveryv1.EndpointSlice {
	meta := newObjectMeta(i)
	meta.Labels = map[string]string{discoveryv1.LabelServiceName: meta.Name}
	meta.ResourceVersion = fmt.Sprint(round)
	proto, yes, node, name, port := v1.ProtocolTCP, true, "w2", "http", int32(8080)
	s := &discoveryv1.EndpointSlice{ObjectMeta: meta, AddressType: discoveryv1.AddressTypeIPv4,
		Ports: []discoveryv1.EndpointPort{{Name: &name, Port: &port, Protocol: &proto}}}
	for j := range endpointsPerService {
		at := i*endpointsPerService + j + round%2
		s.Endpoints = append(s.Endpoints,
			discoveryv1.Endpoint{Addresses: []string{
				netip.AddrFrom4([4]byte{10, 245, byte(at >> 8), byte(at)}).String()},
				NodeName: &node, Conditions: discoveryv1.EndpointConditions{Ready: &yes, Serving: &yes}})
	}
	return s
}
