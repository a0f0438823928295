package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"time"

	v1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/fake"
	"keelson.dev/keelson/agent/policy"
	"keelson.dev/keelson/agent/proxy"
	"keelson.dev/keelson/test/bench/figures"
)

// perGroup is how many pods each peer of a policy means.
const perGroup = 20

// benchPolicies runs each shape in a process and a network namespace of its own, and prints all.
func benchPolicies(ctx context.Context, args []string) error {
	fs := flag.NewFlagSet("policies", flag.ContinueOnError)
	path := fs.String("json", "bench.json", "write JSON lines to this file")
	n := fs.Int("policies", 1000, "how many policies select pods of the node")
	pods := fs.Int("pods", 100, "how many pods the node has; each policy selects one of them, in turn")
	rounds := fs.Int("rounds", 60, "rounds of each measure of traffic, a tenth of a second each, of which the median counts")
	if err := fs.Parse(args); err != nil {
		return err
	}
	if *pods < 2 || *n < *pods {
		return fmt.Errorf("-pods must be 2 at least, and -policies as many as -pods")
	}
	var records []figures.Record
	for _, each := range []int{*n / *pods, *n} {
		fmt.Fprintf(os.Stderr, "%d policies, %d for each pod\n", *n, each)
		r := figures.Record{Measure: "policies", Params: map[string]any{"policies": *n, "policies each": each, "pods": *pods}}
		var err error
		if r.Values, err = asNode(ctx, "policies-node", fmt.Sprint("-policies=", *n), fmt.Sprint("-pods=", *pods), fmt.Sprint("-rounds=", *rounds),
			fmt.Sprint("-all=", each == *n)); err != nil {
			return fmt.Errorf("%d policies: %w", *n, err)
		}
		records = append(records, r)
	}
	if err := appendLines(*path, records); err != nil {
		return err
	}
	return figures.Compare(os.Stdout, policyRows(records), "reference")
}

// policyRows are the table of all shapes.
func policyRows(records []figures.Record) []figures.Row {
	var rows []figures.Row
	for _, r := range records {
		v := r.Values
		head := fmt.Sprintf("%v policies on a node with %v pods, %v for each pod", r.Params["policies"], r.Params["pods"], r.Params["policies each"])
		row := func(name, key, unit, figure, other string) {
			rows = append(rows, paired(v, head, name, key, unit, figure, other))
		}
		rows = append(rows, figures.Row{Measure: "all rules from nothing", Params: head, Key: "policies full sync", Unit: "ms", Figure: v["sync_ms"]})
		for _, to := range []struct{ key, name string }{{"pod", "pod to pod"}, {"service", "pod to Service"}} {
			with, none := to.key, to.key+"_none"
			row("stream "+to.name+", beside none", "policies stream", "MiB/s", "stream_"+with, "stream_"+none)
			row("processor time of a MiB "+to.name+", beside none", "policies cpu", "µs", "stream_cpu_"+with, "stream_cpu_"+none)
			row("connections "+to.name+", beside none", "policies connections", "/s", "connect_"+with, "connect_"+none)
			row("processor time of a connection "+to.name+", beside none", "policies cpu", "µs", "connect_cpu_"+with, "connect_cpu_"+none)
		}
		row("stream pod to pod, beside a plain veth", "", "MiB/s", "stream_pod", "stream_veth")
		row("stream pod to pod, beside a bridge", "", "MiB/s", "stream_pod", "stream_bridge")
		row("connections pod to pod, beside a plain veth", "", "/s", "connect_pod", "connect_veth")
		row("connections pod to pod, beside a bridge", "", "/s", "connect_pod", "connect_bridge")
	}
	return rows
}

// policiesNode is a node: a process in a network namespace of its own, and below it one without policies. It prints what it
// measured as JSON.
func policiesNode(ctx context.Context, args []string) error {
	fs := flag.NewFlagSet("policies-node", flag.ContinueOnError)
	n, pods := fs.Int("policies", 10, ""), fs.Int("pods", 10, "")
	rounds := fs.Int("rounds", 5, "")
	all := fs.Bool("all", false, "")
	if err := fs.Parse(args); err != nil {
		return err
	}
	t, err := newTown()
	if err != nil {
		return fmt.Errorf("making namespaces: %w", err)
	}
	if err := t.serveFew(ctx, proxy.ModeNFTables); err != nil {
		return err
	}
	none, err := fewServices(ctx, proxy.ModeNFTables)
	if err != nil {
		return fmt.Errorf("making a node without policies: %w", err)
	}
	objects := fake.NewCluster()
	found := running{pods: guarded(objects, *n, *pods, *all), told: make(chan struct{})}
	e := policy.New(policy.Config{Objects: objects, Sandboxes: found, Disabled: func() bool { return false }, Log: slog.New(slog.NewTextHandler(os.Stderr, nil))})
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	begin := time.Now()
	go func() { ended <- e.Run(ctx); cancel() }()
	select {
	case <-found.told:
	case <-ctx.Done():
		return <-ended
	}
	for _, p := range found.pods {
		if err := e.Guard(ctx, p, []string{p.Status.PodIP}); err != nil {
			cancel()
			return fmt.Errorf("%w: %w", err, <-ended)
		}
	}
	out := map[string]float64{"sync_ms": float64(time.Since(begin).Microseconds()) / 1e3}
	ways := append([]way{t.toPod("pod", "pod_none", "veth", "bridge"), none.toPod("pod_none"), t.toService("service", "service_none"), none.toService("service_none")}, t.references()...)
	if err := measure(out, ways, *rounds); err != nil {
		return err
	}
	cancel()
	<-ended
	return json.NewEncoder(os.Stdout).Encode(out)
}

// running are the sandboxes of all pods, as an agent that starts again finds them. told is closed when all were asked for.
type running struct {
	pods []*v1.Pod
	told chan struct{}
}

func (r running) ListPodSandbox(context.Context, *cri.ListPodSandboxRequest) (*cri.ListPodSandboxResponse, error) {
	out := &cri.ListPodSandboxResponse{}
	for _, p := range r.pods {
		out.Items = append(out.Items, &cri.PodSandbox{Id: p.Status.PodIP, State: cri.PodSandboxState_SANDBOX_READY, Labels: map[string]string{agent.LabelPodUID: string(p.UID)}})
	}
	return out, nil
}

func (r running) PodSandboxStatus(_ context.Context, req *cri.PodSandboxStatusRequest) (*cri.PodSandboxStatusResponse, error) {
	if req.PodSandboxId == r.pods[len(r.pods)-1].Status.PodIP {
		close(r.told)
	}
	return &cri.PodSandboxStatusResponse{Status: &cri.PodSandboxStatus{Network: &cri.PodSandboxNetworkStatus{Ip: req.PodSandboxId}}}, nil
}

// guarded puts the pods of a node and their policies into a view. Client and server are two of the pods; of the policies
// that select them, the one that comes last lets them reach each other.
func guarded(objects *fake.Cluster, n, pods int, all bool) []*v1.Pod {
	var out []*v1.Pod
	for i := range pods {
		ip := netip.AddrFrom4([4]byte{10, 244, 1, byte(i)}).String()
		switch i {
		case 0:
			ip = podA
		case 1:
			ip = podB
		}
		p := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprint("pod-", i), UID: types.UID(fmt.Sprint("uid-", i)),
			Labels: map[string]string{"app": fmt.Sprint("app-", i), "all": "yes"}}}
		p.Status.PodIP = ip
		objects.Put(p)
		out = append(out, p)
	}
	port, proto := intstr.FromInt32(8080), v1.ProtocolTCP
	end := int32(8081)
	for i := range n {
		group := &v1.Endpoints{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("group-", i)}, Subsets: []v1.EndpointSubset{{}}}
		for j := range perGroup {
			group.Subsets[0].Addresses = append(group.Subsets[0].Addresses, v1.EndpointAddress{IP: netip.AddrFrom4([4]byte{10, 245, byte(i), byte(j)}).String()})
		}
		if i >= n-2 {
			group.Subsets[0].Addresses = append(group.Subsets[0].Addresses, v1.EndpointAddress{IP: podA}, v1.EndpointAddress{IP: podB})
		}
		objects.Put(group)
		chosen := map[string]string{"app": fmt.Sprint("app-", i%pods)}
		if i >= n-2 {
			chosen["app"] = fmt.Sprint("app-", i-(n-2))
		}
		if all {
			chosen = map[string]string{"all": "yes"}
		}
		ports := []networkingv1.NetworkPolicyPort{{Port: &port, EndPort: &end, Protocol: &proto}}
		peers := []networkingv1.NetworkPolicyPeer{{PodSelector: &metav1.LabelSelector{}}}
		objects.Put(&networkingv1.NetworkPolicy{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprintf("policy-%05d", i), ResourceVersion: "1",
				Annotations: map[string]string{agent.AddressGroups: group.Name + "," + group.Name}},
			Spec: networkingv1.NetworkPolicySpec{PodSelector: metav1.LabelSelector{MatchLabels: chosen},
				PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeIngress, networkingv1.PolicyTypeEgress},
				Ingress:     []networkingv1.NetworkPolicyIngressRule{{Ports: ports, From: peers}},
				Egress:      []networkingv1.NetworkPolicyEgressRule{{Ports: ports, To: peers}}},
		})
	}
	return out
}
