package kctl

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/client-go/kubernetes"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/kctl/nettrace"
)

// Metrics of the node agents that 'kctl net policies' reads.
const (
	metricDroppedPackets = "keelson_network_policy_dropped_packets_total"
	metricDroppedBytes   = "keelson_network_policy_dropped_bytes_total"
)

// PolicyUse contains a pod that NetworkPolicies isolate, and the names of these policies. In and
// Out count the packets to and from the pod that its node dropped.
type PolicyUse struct {
	Namespace string   `json:"namespace"`
	Pod       string   `json:"pod"`
	Node      string   `json:"node"`
	Ingress   []string `json:"ingressPolicies"`
	Egress    []string `json:"egressPolicies"`
	In        Dropped  `json:"droppedIn"`
	Out       Dropped  `json:"droppedOut"`
}

// Dropped counts the packets that were dropped because no NetworkPolicy allows their connection.
// Only the first packet of a connection is counted. Each retry of a client counts again.
type Dropped struct {
	Packets uint64 `json:"packets"`
	Bytes   uint64 `json:"bytes"`
}

func netPoliciesCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	c := &cobra.Command{
		Use:   "policies [POD]",
		Short: "Show the pods that NetworkPolicies isolate, and how many packets were dropped",
		Long: "Show the pods that NetworkPolicies isolate, the policies that isolate them in each direction, and\n" +
			"how many packets were dropped because no policy allows the connection.\n" +
			"\n" +
			"Each node counts the packets of its own pods, from the time when the pod got its address or its\n" +
			"rules were rebuilt. A client that retries is counted again.\n" +
			"\n" +
			"Exit codes: 0 all nodes were read; 1 the request failed; 2 some nodes could not be read.",
		Example: "  # In the current namespace\n" +
			"  kctl net policies\n" +
			"\n" +
			"  # In all namespaces\n" +
			"  kctl net policies -A\n" +
			"\n" +
			"  # For one pod, as JSON\n" +
			"  kctl net policies -n shop db-0 -o json",
	}
	output := outputFlag(c)
	return asNodeCountCommand(c, f, streams, "pod", "pods",
		func(ctx context.Context, cs kubernetes.Interface, ns, name string) ([]string, error) {
			uses, err := readIsolated(ctx, cs, ns, name)
			if err != nil {
				return nil, err
			}
			counts, unread, err := readCounts(ctx, cs, parseDrops)
			if err != nil {
				return nil, err
			}
			for i := range uses {
				u := &uses[i]
				at := dropKey{u.Namespace, u.Pod, u.Node, "ingress"}
				u.In = counts[at]
				at.direction = "egress"
				u.Out = counts[at]
			}
			done, err := printJSON(streams.Out, *output, uses)
			if !done {
				err = printPolicyUses(streams.Out, uses)
			}
			return unread, err
		})
}

// readIsolated returns the pods of namespace ns that NetworkPolicies isolate, without counters of
// dropped packets. If name is not empty, it returns only the pod of that name, isolated or not.
func readIsolated(ctx context.Context, cs kubernetes.Interface, ns, name string) ([]PolicyUse, error) {
	var policies []networkingv1.NetworkPolicy
	for o := (metav1.ListOptions{Limit: listLimit}); ; {
		l, err := cs.NetworkingV1().NetworkPolicies(ns).List(ctx, o)
		if err != nil {
			return nil, fmt.Errorf("reading NetworkPolicies: %w", err)
		}
		policies = append(policies, l.Items...)
		if o.Continue = l.Continue; o.Continue == "" {
			break
		}
	}
	slices.SortFunc(policies, func(a, b networkingv1.NetworkPolicy) int { return cmp.Compare(a.Name, b.Name) })
	out := []PolicyUse{}
	take := func(p *corev1.Pod) {
		in, eg := nettrace.Isolating(policies, p)
		if len(in)+len(eg) > 0 && !api.IsPodTerminal(p) || name != "" {
			out = append(out, PolicyUse{Namespace: p.Namespace, Pod: p.Name, Node: p.Spec.NodeName,
				Ingress: in, Egress: eg})
		}
	}
	if name != "" {
		p, err := cs.CoreV1().Pods(ns).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return nil, err
		}
		take(p)
		return out, nil
	}
	for o := (metav1.ListOptions{Limit: listLimit}); len(policies) > 0; {
		l, err := cs.CoreV1().Pods(ns).List(ctx, o)
		if err != nil {
			return nil, fmt.Errorf("reading pods: %w", err)
		}
		for i := range l.Items {
			take(&l.Items[i])
		}
		if o.Continue = l.Continue; o.Continue == "" {
			break
		}
	}
	slices.SortFunc(out, func(a, b PolicyUse) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Pod, b.Pod))
	})
	return out, nil
}

// dropKey identifies the counters of dropped packets of one pod on one node, in one direction
// (ingress or egress).
type dropKey struct{ namespace, pod, node, direction string }

// parseDrops returns the counters of dropped packets in r, which contains the metrics of a node's
// agent. node is the name of the node.
func parseDrops(r io.Reader, node string) (map[dropKey]Dropped, error) {
	out := map[dropKey]Dropped{}
	err := eachSample(r, []string{metricDroppedPackets, metricDroppedBytes},
		func(name string, labels map[string]string, value uint64) {
			at := dropKey{labels["namespace"], labels["pod"], node, labels["direction"]}
			d := out[at]
			if name == metricDroppedBytes {
				d.Bytes = value
			} else {
				d.Packets = value
			}
			out[at] = d
		})
	return out, err
}

func printPolicyUses(w io.Writer, uses []PolicyUse) error {
	t := tabwriter.NewWriter(w, 0, 8, 3, ' ', 0)
	fmt.Fprint(t, "NAMESPACE\tPOD\tNODE\tINGRESS BY\tEGRESS BY\tDROPPED IN\tDROPPED OUT\n")
	for _, u := range uses {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%d\t%d\n", u.Namespace, u.Pod, cmp.Or(u.Node, "-"), joinFirst(u.Ingress),
			joinFirst(u.Egress), u.In.Packets, u.Out.Packets)
	}
	return t.Flush()
}

// joinFirst returns a text with the first three names and the number of omitted names. It returns
// "-" if names is empty.
func joinFirst(names []string) string {
	const most = 3
	text := strings.Join(names[:min(len(names), most)], ",")
	if n := len(names) - most; n > 0 {
		text += fmt.Sprintf(" and %d more", n)
	}
	return cmp.Or(text, "-")
}
