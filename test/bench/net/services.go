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
	"keelson.dev/keelson/test/bench/figures"
)

// perService is how many endpoints each Service has.
const perService = 5

// benchServices runs each size in a process and a network namespace of its own, and prints all.
func benchServices(ctx context.Context, args []string) error {
	fs := flag.NewFlagSet("services", flag.ContinueOnError)
	path := fs.String("json", "bench.json", "write JSON lines to this file")
	mode := fs.String("mode", "nftables", "what rules are written in: nftables or iptables")
	rounds := fs.Int("rounds", 60, "rounds of each measure of traffic, a tenth of a second each, of which the median counts")
	sizes := fs.String("sizes", "10,1000,10000", "how many Services there are, with 5 endpoints each; the first and the last also meet traffic")
	err := fs.Parse(args)
	if err != nil {
		return err
	}
	var records []figures.Record
	all := strings.Split(*sizes, ",")
	for i, size := range all {
		fmt.Fprintf(os.Stderr, "%s Services in mode %s\n", size, *mode)
		r := figures.Record{Measure: "services", Params: map[string]any{"services": size, "endpoints each": perService, "mode": *mode}}
		if r.Values, err = asNode(ctx, "services-node", "-mode", *mode, "-services", size, fmt.Sprint("-rounds=", *rounds),
			fmt.Sprint("-traffic=", i == 0 || i == len(all)-1)); err != nil {
			return fmt.Errorf("%s Services: %w", size, err)
		}
		records = append(records, r)
	}
	if err := appendLines(*path, records); err != nil {
		return err
	}
	return figures.Compare(os.Stdout, serviceRows(records), "reference")
}

// asNode runs a command of this program in a network namespace of its own, and returns the figures that it prints.
func asNode(ctx context.Context, args ...string) (values map[string]float64, err error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, self, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%w: it needs root, for network namespaces, and nft", err)
	}
	return values, json.Unmarshal(out, &values)
}

func appendLines(path string, records []figures.Record) error {
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

// serviceRows are the table of all sizes.
func serviceRows(records []figures.Record) []figures.Row {
	var rows []figures.Row
	for _, r := range records {
		v := r.Values
		head := fmt.Sprintf("%v Services with %d endpoints each, mode %v", r.Params["services"], perService, r.Params["mode"])
		alone := func(name, key, unit, figure string) {
			rows = append(rows, figures.Row{Measure: name, Params: head, Key: key, Unit: unit, Figure: v[figure]})
		}
		alone("all rules from nothing", "services full sync", "ms", "sync_ms")
		alone("one change, until its revision is confirmed: median", "services change p50", "ms", "change_p50_ms")
		alone("one change: p99", "services change p99", "ms", "change_p99_ms")
		alone("memory for objects, model and writing", "services memory", "MiB", "memory_MiB")
		if v["stream_pod"] == 0 {
			continue
		}
		row := func(name, key, unit, figure, other string) {
			rows = append(rows, paired(v, head, name, key, unit, figure, other))
		}
		row("stream pod to Service, beside pod to pod", "services stream", "MiB/s", "stream_service", "stream_pod")
		row("stream pod to pod, beside a plain veth", "", "MiB/s", "stream_pod", "stream_veth")
		row("stream pod to pod, beside a bridge", "", "MiB/s", "stream_pod", "stream_bridge")
		row("processor time of a MiB to a Service, beside pod to pod", "services stream cpu", "µs", "stream_cpu_service", "stream_cpu_pod")
		row("processor time of a MiB to a Service, beside a node with few", "services many cpu", "µs", "stream_cpu_service", "stream_cpu_few")
		row("connections pod to Service, beside pod to pod", "services connections", "/s", "connect_service", "connect_pod")
		row("connections pod to pod, beside a plain veth", "", "/s", "connect_pod", "connect_veth")
		row("connections pod to pod, beside a bridge", "", "/s", "connect_pod", "connect_bridge")
		row("processor time of a connection to a Service, beside pod to pod", "services connections cpu", "µs", "connect_cpu_service", "connect_cpu_pod")
		row("processor time of a connection to a Service, beside a node with few", "services many cpu", "µs", "connect_cpu_service", "connect_cpu_few")
		row("stream to a Service, beside a node with few Services", "services many", "MiB/s", "stream_service", "stream_few")
		row("connections to a Service, beside a node with few", "services many", "/s", "connect_service", "connect_few")
	}
	return rows
}

// watched tells which revision the proxy confirmed last.
type watched struct {
	*cluster
	mu   sync.Mutex
	cond *sync.Cond
	last uint64
}

type cluster = fake.Cluster

func (w *watched) ProxyApplied(revision uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.last = revision
	w.cond.Broadcast()
}

func (w *watched) await(revision uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for w.last < revision {
		w.cond.Wait()
	}
}

// servicesNode is a node: a process in a network namespace of its own. It prints what it measured as JSON.
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
	t, err := newTown()
	if err != nil {
		return fmt.Errorf("making namespaces: %w", err)
	}
	before := held()
	objects := &watched{cluster: fake.NewCluster()}
	objects.cond = sync.NewCond(&objects.mu)
	objects.About.ServiceCIDR, objects.About.ClusterCIDR = "10.96.0.0/12", "10.244.0.0/14"
	for i := range *n {
		objects.Put(serviceOf(i), sliceOf(i, 0))
	}
	objects.Put(serviceOf(0), t.backend())
	p := &proxy.Proxy{Node: "w1", NodeIP: netip.MustParseAddr(nodeIP), Mode: mode, Log: slog.New(slog.DiscardHandler)}
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	peak := watchMemory(ctx)
	begin := time.Now()
	go func() { ended <- p.Run(ctx, objects, objects); cancel(); objects.ProxyApplied(^uint64(0)) }()
	objects.await(objects.Revision())
	out["sync_ms"] = float64(time.Since(begin).Microseconds()) / 1e3
	var took []time.Duration
	for i := range 200 {
		which := 1 + i%(*n-1)
		begin := time.Now()
		objects.Put(sliceOf(which, 1+i/(*n-1)))
		objects.await(objects.Revision())
		took = append(took, time.Since(begin))
	}
	out["change_p50_ms"] = figures.Quantile(took, 0.5) / 1e6
	out["change_p99_ms"] = figures.Quantile(took, 0.99) / 1e6
	out["memory_MiB"] = (peak() - before) / (1 << 20)
	if ctx.Err() != nil {
		return <-ended
	}
	if *traffic {
		few, err := fewServices(ctx, mode)
		if err != nil {
			return fmt.Errorf("making a node with few Services: %w", err)
		}
		if err := measure(out, append([]way{t.toPod("pod", "veth", "bridge"), t.toService("service", "pod", "few"), few.toService("few")}, t.references()...), *rounds); err != nil {
			return err
		}
	}
	cancel()
	<-ended
	return json.NewEncoder(os.Stdout).Encode(out)
}

// fewServices is another node of the same kind, in a namespace below, with ten Services.
func fewServices(ctx context.Context, mode proxy.Mode) (t *town, err error) {
	node, err := newNamespace()
	if err != nil {
		return nil, err
	}
	err = inside(node, func() (err error) {
		if t, err = newTown(); err != nil {
			return err
		}
		return t.serveFew(ctx, mode)
	})
	return t, err
}

// serveFew writes rules of ten Services, of which one leads to the town's server.
func (t *town) serveFew(ctx context.Context, mode proxy.Mode) error {
	services, parts := []*v1.Service{serviceOf(0)}, []*discoveryv1.EndpointSlice{t.backend()}
	for i := 1; i < 10; i++ {
		services, parts = append(services, serviceOf(i)), append(parts, sliceOf(i, 0))
	}
	w, err := proxy.NewWriter(mode)
	if err != nil {
		return err
	}
	base := proxy.Base{ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/12")}, PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/14")}}
	return w.Sync(ctx, base, maps.Values(proxy.Compute(services, parts, proxy.Location{Node: "w1"}).Ports()))
}

// held is the memory of this process's heap and stacks that the system gave and that is in use.
func held() float64 {
	runtime.GC()
	debug.FreeOSMemory()
	return used()
}

func used() float64 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return float64(m.Sys - m.HeapReleased)
}

// watchMemory returns what tells the most that was used since.
func watchMemory(ctx context.Context) func() float64 {
	var mu sync.Mutex
	most := used()
	look := func() float64 {
		now := used()
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

func metaOf(i int) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprintf("service-%d", i), ResourceVersion: "1"}
}

func serviceOf(i int) *v1.Service {
	s := &v1.Service{ObjectMeta: metaOf(i)}
	s.Spec.ClusterIP = netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)}).String()
	s.Spec.Ports = []v1.ServicePort{{Name: "http", Port: 80, Protocol: v1.ProtocolTCP}}
	if i == 0 {
		s.Spec.ClusterIP = serviceIP
		s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: "sink", Port: 81, Protocol: v1.ProtocolTCP})
	}
	return s
}

// sliceOf are a Service's endpoints on other nodes; each turn is another set.
func sliceOf(i, turn int) *discoveryv1.EndpointSlice {
	meta := metaOf(i)
	meta.Labels = map[string]string{discoveryv1.LabelServiceName: meta.Name}
	meta.ResourceVersion = fmt.Sprint(turn)
	proto, yes, node, name, port := v1.ProtocolTCP, true, "w2", "http", int32(8080)
	s := &discoveryv1.EndpointSlice{ObjectMeta: meta, AddressType: discoveryv1.AddressTypeIPv4,
		Ports: []discoveryv1.EndpointPort{{Name: &name, Port: &port, Protocol: &proto}}}
	for j := range perService {
		at := i*perService + j + turn%2
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{netip.AddrFrom4([4]byte{10, 245, byte(at >> 8), byte(at)}).String()},
			NodeName: &node, Conditions: discoveryv1.EndpointConditions{Ready: &yes, Serving: &yes}})
	}
	return s
}
