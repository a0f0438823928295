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

// podsPerGroup is the number of pods that each peer of a policy selects.
const podsPerGroup = 20

// benchPolicies measures few and many policies per pod, each in its own process and network
// namespace, and prints a table.
func benchPolicies(ctx context.Context, args []string) error {
	fs := flag.NewFlagSet("policies", flag.ContinueOnError)
	path := fs.String("json", "bench.json", "write JSON lines to this file")
	n := fs.Int("policies", 1000, "number of policies that select pods of the node")
	pods := fs.Int("pods", 100, "number of pods of the node; each policy selects one pod, in turn")
	rounds := fs.Int("rounds", 60,
		"rounds of each traffic measurement, 0.1 s each; figures are medians of the rounds")
	if err := fs.Parse(args); err != nil {
		return err
	}
	if *pods < 2 || *n < *pods {
		return fmt.Errorf("-pods must be at least 2, and -policies at least as many as -pods")
	}
	var records []figures.Record
	for _, each := range []int{*n / *pods, *n} {
		fmt.Fprintf(os.Stderr, "%d policies, %d for each pod\n", *n, each)
		r := figures.Record{Measure: "policies",
			Params: map[string]any{"policies": *n, "policies each": each, "pods": *pods}}
		var err error
		if r.Values, err = runAsNode(ctx, "policies-node", fmt.Sprint("-policies=", *n), fmt.Sprint("-pods=", *pods),
			fmt.Sprint("-rounds=", *rounds),
			fmt.Sprint("-all=", each == *n)); err != nil {
			return fmt.Errorf("%d policies: %w", *n, err)
		}
		records = append(records, r)
	}
	if err := appendRecords(*path, records); err != nil {
		return err
	}
	return figures.Compare(os.Stdout, policyRows(records), "reference")
}

// policyRows returns the rows of the table for the records of all measurements.
func policyRows(records []figures.Record) []figures.Row {
	var rows []figures.Row
	for _, r := range records {
		v := r.Values
		head := fmt.Sprintf("%v policies on a node with %v pods, %v for each pod", r.Params["policies"],
			r.Params["pods"], r.Params["policies each"])
		row := func(name, key, unit, figure, other string) {
			rows = append(rows, pairedRow(v, head, name, key, unit, figure, other))
		}
		rows = append(rows, figures.Row{Measure: "first write of all rules", Params: head, Key: "policies full sync",
			Unit: "ms", Figure: v["sync_ms"]})
		for _, to := range []struct{ key, name string }{{"pod", "pod to pod"}, {"service", "pod to Service"}} {
			with, none := to.key, to.key+"_none"
			row("stream "+to.name+", compared with none", "policies stream", "MiB/s", "stream_"+with, "stream_"+none)
			row("CPU time of a MiB "+to.name+", compared with none", "policies cpu", "µs", "stream_cpu_"+with,
				"stream_cpu_"+none)
			row("connections "+to.name+", compared with none", "policies connections", "/s", "connect_"+with,
				"connect_"+none)
			row("CPU time of a connection "+to.name+", compared with none", "policies cpu", "µs", "connect_cpu_"+with,
				"connect_cpu_"+none)
		}
		row("stream pod to pod, compared with a plain veth", "", "MiB/s", "stream_pod", "stream_veth")
		row("stream pod to pod, compared with a bridge", "", "MiB/s", "stream_pod", "stream_bridge")
		row("connections pod to pod, compared with a plain veth", "", "/s", "connect_pod", "connect_veth")
		row("connections pod to pod, compared with a bridge", "", "/s", "connect_pod", "connect_bridge")
	}
	return rows
}

// policiesNode simulates a node in the network namespace of this process, and a node without
// policies in another. It prints the measured values as JSON.
func policiesNode(ctx context.Context, args []string) error {
	fs := flag.NewFlagSet("policies-node", flag.ContinueOnError)
	n, pods := fs.Int("policies", 10, ""), fs.Int("pods", 10, "")
	rounds := fs.Int("rounds", 5, "")
	all := fs.Bool("all", false, "")
	if err := fs.Parse(args); err != nil {
		return err
	}
	t, err := newNodeNetwork()
	if err != nil {
		return fmt.Errorf("creating network namespaces: %w", err)
	}
	if err := t.writeFewServices(ctx, proxy.ModeNFTables); err != nil {
		return err
	}
	none, err := newNodeWithFewServices(ctx, proxy.ModeNFTables)
	if err != nil {
		return fmt.Errorf("creating a node without policies: %w", err)
	}
	objects := fake.NewCluster()
	found := runningSandboxes{pods: addPodsAndPolicies(objects, *n, *pods, *all), inspected: make(chan struct{})}
	e := policy.New(policy.Config{Objects: objects, Sandboxes: found, Disabled: func() bool {
		return false
	}, Log: slog.New(slog.NewTextHandler(os.Stderr, nil))})
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	begin := time.Now()
	go func() { ended <- e.Run(ctx); cancel() }()
	select {
	case <-found.inspected:
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
	ways := append([]trafficPath{t.pathToPod("pod", "pod_none", "veth", "bridge"), none.pathToPod("pod_none"),
		t.pathToService("service", "service_none"), none.pathToService("service_none")}, t.referencePaths()...)
	if err := measurePaths(out, ways, *rounds); err != nil {
		return err
	}
	cancel()
	<-ended
	return json.NewEncoder(os.Stdout).Encode(out)
}

// runningSandboxes is a sandbox runtime in which the sandboxes of all pods already run, as an agent
// finds them after a restart. inspected is closed when the last sandbox was inspected.
type runningSandboxes struct {
	pods      []*v1.Pod
	inspected chan struct{}
}

func (r runningSandboxes) ListPodSandbox(context.Context, *cri.ListPodSandboxRequest) (
	*cri.ListPodSandboxResponse, error,
) {
	out := &cri.ListPodSandboxResponse{}
	for _, p := range r.pods {
		out.Items = append(out.Items, &cri.PodSandbox{Id: p.Status.PodIP, State: cri.PodSandboxState_SANDBOX_READY,
			Labels: map[string]string{agent.LabelPodUID: string(p.UID)}})
	}
	return out, nil
}

func (r runningSandboxes) PodSandboxStatus(_ context.Context, req *cri.PodSandboxStatusRequest) (
	*cri.PodSandboxStatusResponse, error,
) {
	if req.PodSandboxId == r.pods[len(r.pods)-1].Status.PodIP {
		close(r.inspected)
	}
	return &cri.PodSandboxStatusResponse{
		Status: &cri.PodSandboxStatus{Network: &cri.PodSandboxNetworkStatus{Ip: req.PodSandboxId}}}, nil
}

// addPodsAndPolicies adds the pods of a node and their policies to objects, and returns the pods.
// The client and the server are the first two pods. The last policies that select them allow
// traffic between them.
func addPodsAndPolicies(objects *fake.Cluster, n, pods int, all bool) []*v1.Pod {
	var out []*v1.Pod
	for i := range pods {
		ip := netip.AddrFrom4([4]byte{10, 244, 1, byte(i)}).String()
		switch i {
		case 0:
			ip = podA
		case 1:
			ip = podB
		}
		p := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprint("pod-", i),
			UID:    types.UID(fmt.Sprint("uid-", i)),
			Labels: map[string]string{"app": fmt.Sprint("app-", i), "all": "yes"}}}
		p.Status.PodIP = ip
		objects.Put(p)
		out = append(out, p)
	}
	port, proto := intstr.FromInt32(8080), v1.ProtocolTCP
	end := int32(8081)
	for i := range n {
		group := &v1.Endpoints{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("group-", i)},
			Subsets: []v1.EndpointSubset{{}}}
		for j := range podsPerGroup {
			group.Subsets[0].Addresses = append(group.Subsets[0].Addresses,
				v1.EndpointAddress{IP: netip.AddrFrom4([4]byte{10, 245, byte(i), byte(j)}).String()})
		}
		if i >= n-2 {
			group.Subsets[0].Addresses = append(group.Subsets[0].Addresses, v1.EndpointAddress{IP: podA},
				v1.EndpointAddress{IP: podB})
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
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprintf("policy-%05d", i),
				ResourceVersion: "1",
				Annotations:     map[string]string{agent.AddressGroups: group.Name + "," + group.Name}},
			Spec: networkingv1.NetworkPolicySpec{PodSelector: metav1.LabelSelector{MatchLabels: chosen},
				PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeIngress, networkingv1.PolicyTypeEgress},
				Ingress:     []networkingv1.NetworkPolicyIngressRule{{Ports: ports, From: peers}},
				Egress:      []networkingv1.NetworkPolicyEgressRule{{Ports: ports, To: peers}}},
		})
	}
	return out
}
