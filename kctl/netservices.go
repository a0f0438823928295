package kctl

import (
	"bufio"
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/client-go/kubernetes"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"
)

// Metrics of the node agents that 'kctl net services' reads, and limits for reading the metrics of
// all nodes.
const (
	metricConnections = "keelson_service_connections_total"
	metricUnserved    = "keelson_service_unserved_packets_total"
	nodesAtOnce       = 8
	nodeTime          = 15 * time.Second
	maxMetricsBytes   = 64 << 20 // maximum size of a node's metrics, in bytes
)

// ServiceUse contains a Service, the number of its endpoints, and the number of connections to it,
// on one node or on all nodes.
type ServiceUse struct {
	Namespace   string `json:"namespace"`
	Name        string `json:"name"`
	Type        string `json:"type"`
	Address     string `json:"address"`
	Ready       int    `json:"readyEndpoints"`
	Endpoints   int    `json:"endpoints"`
	Node        string `json:"node,omitempty"` // empty for the sum of all nodes that were read
	Connections uint64 `json:"connections"`    // from clients inside the cluster
	Outside     uint64 `json:"outside"`        // from clients outside the cluster
	Unserved    uint64 `json:"unservedPackets"`
}

func netServicesCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	c := &cobra.Command{
		Use:   "services [NAME]",
		Short: "Show the connections to Services by source, and the packets without an endpoint",
		Long: "Show how Services were used. Each node counts the connections for which it chose an endpoint, and\n" +
			"the packets to a Service that had no endpoint for them. CONNECTIONS counts the connections to\n" +
			"cluster IPs, which come from pods and nodes. FROM OUTSIDE counts the connections to node ports\n" +
			"and external addresses.\n" +
			"\n" +
			"The counters start when the node's rules are built. The counters of an address that was not used\n" +
			"for a day start again at 0. Reading the counters does not change them.\n" +
			"\n" +
			"Exit codes: 0 all nodes were read; 1 the request failed; 2 some nodes could not be read.",
		Example: "  # In the current namespace\n" +
			"  kctl net services\n" +
			"\n" +
			"  # In all namespaces\n" +
			"  kctl net services -A\n" +
			"\n" +
			"  # One Service, with a row for each node\n" +
			"  kctl net services -n shop db --nodes",
	}
	output := outputFlag(c)
	perNode := c.Flags().Bool("nodes", false, "show a row for each node that counted packets or connections")
	return asNodeCountCommand(c, f, streams, "service", "Services",
		func(ctx context.Context, cs kubernetes.Interface, ns, name string) ([]string, error) {
			services, err := readServices(ctx, cs, ns, name)
			if err != nil {
				return nil, err
			}
			counts, unread, err := readCounts(ctx, cs, parseCounts)
			if err != nil {
				return nil, err
			}
			uses := joinServiceUses(services, counts, *perNode)
			done, err := printJSON(streams.Out, *output, uses)
			if !done {
				err = printUses(streams.Out, uses, *perNode)
			}
			return unread, err
		})
}

// asNodeCountCommand sets the run function of c, adds the flag -A (--all-namespaces), and returns
// c. The command shows counters that the node agents keep for one object or for all objects of a
// namespace. With -A, it shows the counters for all objects. singular and plural are the names of
// the kind in texts. The run function calls show, which prints the counters and returns the nodes
// that could not be read, with reasons. If there are such nodes, the command prints them and its
// exit code is 2.
func asNodeCountCommand(
	c *cobra.Command, f cmdutil.Factory, streams genericiooptions.IOStreams, singular, plural string,
	show func(ctx context.Context, cs kubernetes.Interface, ns, name string) (unread []string, err error),
) *cobra.Command {
	everywhere := c.Flags().BoolP("all-namespaces", "A", false, "list the "+plural+" of all namespaces")
	c.Args = cobra.MaximumNArgs(1)
	c.RunE = func(cmd *cobra.Command, args []string) error {
		ns, _, err := f.ToRawKubeConfigLoader().Namespace()
		if err != nil {
			return err
		}
		if *everywhere && len(args) > 0 {
			return fmt.Errorf("%s %s: -A shows all %s of all namespaces: leave out the name, or name its namespace "+
				"with -n", singular, args[0], plural)
		}
		if *everywhere {
			ns = metav1.NamespaceAll
		}
		cs, err := f.KubernetesClientSet()
		if err != nil {
			return err
		}
		unread, err := show(cmp.Or(cmd.Context(), context.Background()), cs, ns, strings.Join(args, ""))
		for _, u := range unread {
			fmt.Fprintln(streams.ErrOut, "not read:", u)
		}
		if err == nil && len(unread) > 0 {
			err = errFound
		}
		return err
	}
	return c
}

// readServices returns the Services of namespace ns with the numbers of their endpoints, without
// counters of connections. If name is not empty, it returns only the Service of that name.
func readServices(ctx context.Context, cs kubernetes.Interface, ns, name string) ([]ServiceUse, error) {
	var services []corev1.Service
	if name != "" {
		s, err := cs.CoreV1().Services(ns).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return nil, err
		}
		services = append(services, *s)
	}
	slicesOf := metav1.ListOptions{Limit: listLimit}
	if name != "" {
		slicesOf.LabelSelector = discoveryv1.LabelServiceName + "=" + name
	}
	for o := (metav1.ListOptions{Limit: listLimit}); name == ""; {
		l, err := cs.CoreV1().Services(ns).List(ctx, o)
		if err != nil {
			return nil, fmt.Errorf("reading Services: %w", err)
		}
		services = append(services, l.Items...)
		if o.Continue = l.Continue; o.Continue == "" {
			break
		}
	}
	type key struct{ ns, name, address string }
	ready := map[key]bool{} // whether the endpoint with that address is ready
	for {
		l, err := cs.DiscoveryV1().EndpointSlices(ns).List(ctx, slicesOf)
		if err != nil {
			return nil, fmt.Errorf("reading EndpointSlices: %w", err)
		}
		for _, s := range l.Items {
			for _, e := range s.Endpoints {
				if len(e.Addresses) > 0 {
					k := key{s.Namespace, s.Labels[discoveryv1.LabelServiceName], e.Addresses[0]}
					ready[k] = ready[k] || e.Conditions.Ready == nil || *e.Conditions.Ready
				}
			}
		}
		if slicesOf.Continue = l.Continue; slicesOf.Continue == "" {
			break
		}
	}
	all, some := map[key]int{}, map[key]int{}
	for k, is := range ready {
		k.address = ""
		all[k]++
		if is {
			some[k]++
		}
	}
	var out []ServiceUse
	for _, s := range services {
		k := key{s.Namespace, s.Name, ""}
		out = append(out, ServiceUse{Namespace: s.Namespace, Name: s.Name, Type: string(s.Spec.Type),
			Address: cmp.Or(s.Spec.ClusterIP, s.Spec.ExternalName), Ready: some[k], Endpoints: all[k]})
	}
	return out, nil
}

// serviceUseKey identifies the connection counters of one Service on one node.
type serviceUseKey struct{ namespace, name, node string }

// readCounts reads the metrics of all node agents, at most nodesAtOnce at a time. It calls parse
// with the metrics and the name of each node, and merges the returned maps. unread lists the nodes
// that could not be read, with reasons.
func readCounts[M ~map[K]V, K comparable, V any](
	ctx context.Context, cs kubernetes.Interface, parse func(io.Reader, string) (M, error),
) (counts M, unread []string, err error) {
	nodes, err := cs.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, nil, fmt.Errorf("reading nodes: %w", err)
	}
	counts = M{}
	var mu sync.Mutex
	var all sync.WaitGroup
	room := make(chan struct{}, nodesAtOnce)
	for i := range nodes.Items {
		node := nodes.Items[i].Name
		all.Go(func() {
			room <- struct{}{}
			defer func() { <-room }()
			got, err := readNode(ctx, cs, node, parse)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				unread = append(unread, fmt.Sprintf("node %s: %v", node, err))
				return
			}
			maps.Copy(counts, got)
		})
	}
	all.Wait()
	slices.Sort(unread)
	return counts, unread, nil
}

func readNode[M any](
	ctx context.Context, cs kubernetes.Interface, node string, parse func(io.Reader, string) (M, error),
) (got M, err error) {
	ctx, cancel := context.WithTimeout(ctx, nodeTime)
	defer cancel()
	body, err := cs.CoreV1().RESTClient().Get().Resource("nodes").Name(node).SubResource("proxy").Suffix("metrics").
		Stream(ctx)
	if err != nil {
		return got, err
	}
	defer body.Close()
	return parse(io.LimitReader(body, maxMetricsBytes), node)
}

// parseCounts returns the connection counters of Services in r, which contains the metrics of a
// node's agent. node is the name of the node.
func parseCounts(r io.Reader, node string) (map[serviceUseKey]ServiceUse, error) {
	out := map[serviceUseKey]ServiceUse{}
	err := eachSample(r, []string{metricConnections, metricUnserved},
		func(name string, labels map[string]string, value uint64) {
			at := serviceUseKey{labels["namespace"], labels["service"], node}
			u := out[at]
			switch {
			case name == metricUnserved:
				u.Unserved += value
			case labels["from"] == "outside":
				u.Outside += value
			default:
				u.Connections += value
			}
			out[at] = u
		})
	return out, err
}

// eachSample calls visit for each sample in r that belongs to one of the given metrics. r contains
// the metrics of a node's agent in the Prometheus text format. It fails if such a sample cannot be
// parsed. The caller adds the name of the node to the error.
func eachSample(
	r io.Reader, metrics []string, visit func(metric string, labels map[string]string, value uint64),
) error {
	lines := bufio.NewScanner(r)
	lines.Buffer(make([]byte, 64<<10), 1<<20)
	for lines.Scan() {
		metric, rest, ok := strings.Cut(lines.Text(), "{")
		if !ok || !slices.Contains(metrics, metric) {
			continue
		}
		labels, value, ok := parseSample(rest)
		if !ok {
			return fmt.Errorf("the metrics contain a line that cannot be parsed: %.120q: use the kctl of the release "+
				"of the agent", lines.Text())
		}
		visit(metric, labels, value)
	}
	return lines.Err()
}

// parseSample parses the part of a sample in the Prometheus text format after the opening brace:
// name="value",...} number. ok is false if the text has another form.
func parseSample(s string) (labels map[string]string, value uint64, ok bool) {
	labels = map[string]string{}
	for {
		name, rest, ok := strings.Cut(s, "=")
		if !ok {
			return nil, 0, false
		}
		quoted, err := strconv.QuotedPrefix(rest)
		if err != nil {
			return nil, 0, false
		}
		if labels[name], err = strconv.Unquote(quoted); err != nil {
			return nil, 0, false
		}
		s = rest[len(quoted):]
		if after, more := strings.CutPrefix(s, ","); more {
			s = after
			continue
		}
		number, ok := strings.CutPrefix(s, "} ")
		if !ok {
			return nil, 0, false
		}
		v, err := strconv.ParseUint(number, 10, 64)
		return labels, v, err == nil
	}
}

// joinServiceUses adds the connection counters in counts to services, and returns the rows of the
// table, sorted by name. There is one row for each Service. If perNode is true, there is one row
// for each Service and node with counters.
func joinServiceUses(services []ServiceUse, counts map[serviceUseKey]ServiceUse, perNode bool) []ServiceUse {
	nodes := map[[2]string][]string{}
	for at := range counts {
		k := [2]string{at.namespace, at.name}
		nodes[k] = append(nodes[k], at.node)
	}
	out := []ServiceUse{}
	for _, s := range services {
		whole := s
		for _, node := range slices.Sorted(slices.Values(nodes[[2]string{s.Namespace, s.Name}])) {
			c := counts[serviceUseKey{s.Namespace, s.Name, node}]
			whole.Connections, whole.Outside, whole.Unserved = whole.Connections+c.Connections, whole.Outside+c.Outside,
				whole.Unserved+c.Unserved
			if perNode {
				one := s
				one.Node, one.Connections, one.Outside, one.Unserved = node, c.Connections, c.Outside, c.Unserved
				out = append(out, one)
			}
		}
		if !perNode {
			out = append(out, whole)
		}
	}
	slices.SortStableFunc(out, func(a, b ServiceUse) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name), cmp.Compare(a.Node, b.Node))
	})
	return out
}

func printUses(w io.Writer, uses []ServiceUse, perNode bool) error {
	t := tabwriter.NewWriter(w, 0, 8, 3, ' ', 0)
	node := ""
	if perNode {
		node = "\tNODE"
	}
	fmt.Fprintf(t, "NAMESPACE\tNAME\tTYPE\tADDRESS\tREADY%s\tCONNECTIONS\tFROM OUTSIDE\tUNSERVED\n", node)
	for _, u := range uses {
		if perNode {
			node = "\t" + u.Node
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%d/%d%s\t%d\t%d\t%d\n", u.Namespace, u.Name, u.Type, cmp.Or(u.Address, "-"),
			u.Ready, u.Endpoints, node,
			u.Connections, u.Outside, u.Unserved)
	}
	return t.Flush()
}
