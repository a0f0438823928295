package kctl

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"

	"keelson.dev/keelson/kctl/nettrace"
	"keelson.dev/keelson/kctl/verb"
)

// maxEndpointPods is the maximum number of pods that one trace reads because endpoints refer to
// them. Each pod requires a request.
const maxEndpointPods = 100

func netCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	c := &cobra.Command{
		Use:     "net",
		Short:   "Inspect the cluster's network",
		Example: "  kctl net trace web-0 db:5432\n  kctl net services -A\n  kctl net policies -A",
	}
	verb.NewGroup(c, netTraceCommand(f, streams), netServicesCommand(f, streams), netPoliciesCommand(f, streams))
	return c
}

func netTraceCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	c := &cobra.Command{
		Use:   "trace POD SERVICE|NAME|ADDRESS[:PORT][/PROTOCOL]|URL",
		Short: "Trace a connection from a pod, and show where it fails",
		Long: "Trace a connection from a pod step by step. No packet is sent. The trace shows:\n" +
			"\n" +
			"  - the addresses to which the name resolves in the pod\n" +
			"  - the rules of the Service, and its ready endpoints\n" +
			"  - the routes to the nodes of the endpoints\n" +
			"  - the NetworkPolicies of both sides\n" +
			"\n" +
			"For a host or URL that an Ingress or a Gateway serves, the trace includes the class or Gateway, the\n" +
			"listener, the certificate, the rule, and the connections to and from the ingress proxies.\n" +
			"\n" +
			"The trace is computed from the objects of the cluster. For a host outside the cluster, kctl asks\n" +
			"the agent of the pod's node whether the name resolves and whether a route exists. This requires\n" +
			"the verb get on nodes/proxy.\n" +
			"\n" +
			"Exit codes: 0 the connection is possible; 1 the trace failed (no such pod, no cluster); 2 the\n" +
			"connection fails, or some of the connections fail.",
		Example: "  # The Service db in the namespace of the pod\n" +
			"  kctl net trace web-0 db\n" +
			"\n" +
			"  # A port of a Service in another namespace\n" +
			"  kctl net trace -n shop web-0 db.data:5432\n" +
			"\n" +
			"  # The address of a pod, a Service or a node\n" +
			"  kctl net trace web-0 10.244.1.7:8080\n" +
			"\n" +
			"  # A URL that an Ingress or a Gateway serves\n" +
			"  kctl net trace web-0 https://shop.example/cart\n" +
			"\n" +
			"  # Another protocol\n" +
			"  kctl net trace web-0 kube-dns.kube-system:53/udp -o json",
	}
	output := outputFlag(c)
	domain := c.Flags().String("cluster-domain", "cluster.local", "DNS domain of the cluster")
	c.Args = func(c *cobra.Command, args []string) error {
		if len(args) == 1 { // report an invalid pod argument before the missing second argument
			if _, err := podArgument(args[0]); err != nil {
				return err
			}
		}
		return cobra.ExactArgs(2)(c, args)
	}
	c.RunE = func(cmd *cobra.Command, args []string) error {
		target, err := nettrace.ParseTarget(args[1])
		if err != nil {
			return err
		}
		name, err := podArgument(args[0])
		if err != nil {
			return err
		}
		info, err := getObject(f, "net trace follows", []string{"pod", name})
		if err != nil {
			return err
		}
		pod, ok := toTyped(info.Object).(*corev1.Pod)
		if !ok {
			return fmt.Errorf("%s is not a pod: a trace starts at a pod, POD or pod/POD", info.ObjectName())
		}
		cs, err := f.KubernetesClientSet()
		if err != nil {
			return err
		}
		cluster, err := f.DynamicClient()
		if err != nil {
			return err
		}
		ctx := cmd.Context()
		if ctx == nil {
			ctx = context.Background()
		}
		r := &netReader{ctx: ctx, cs: cs, world: nettrace.World{Domain: *domain, Pod: pod}}
		r.readCluster(cluster, target)
		if r.err != nil {
			return fmt.Errorf("tracing from pod %s: %w", pod.Name, r.err)
		}
		report := nettrace.Trace(&r.world, target)
		done, err := printJSON(streams.Out, *output, report)
		if !done {
			err = report.Print(streams.Out)
		}
		if err == nil && (report.Stops != "" || report.Partly) {
			err = errFound
		}
		return err
	}
	return c
}

// podArgument returns the name of the pod in a command argument of the form POD or pod/POD.
func podArgument(arg string) (string, error) {
	kind, name, has := strings.Cut(arg, "/")
	switch {
	case !has:
		return arg, nil
	case name != "" && slices.Contains([]string{"pod", "pods", "po"}, strings.ToLower(kind)):
		return name, nil
	}
	return "", verb.NewFormError(fmt.Sprintf("%q is not a pod: a trace starts at one pod, POD or pod/POD "+
		"('kctl get pods' lists them), and goes to %s: kctl net trace web-0 db:5432", arg, nettrace.TargetForms))
}

// netReader reads the objects that a trace of 'kctl net trace' needs into world.
type netReader struct {
	ctx   context.Context
	cs    kubernetes.Interface
	world nettrace.World
	err   error // the first error other than a missing permission; later reads do nothing
}

// listForTrace returns a list of at most listLimit objects, which it requests with the function
// read. listName is the name of the list in messages. If the user may not read the list or its kind
// is not served, ok is false and listName is added to r.world.Unread. listName is also added if the
// list is longer than listLimit; then ok is true. After any other error, r.err is set, and ok is
// false for this and all further calls.
func listForTrace[L metav1.ListInterface](
	r *netReader, listName string, o metav1.ListOptions, read func(context.Context, metav1.ListOptions) (L, error),
) (got L, ok bool) {
	if r.err != nil {
		return got, false
	}
	o.Limit = listLimit
	got, err := read(r.ctx, o)
	switch {
	case apierrors.IsForbidden(err), apierrors.IsNotFound(err):
		r.addUnread(listName)
		return got, false
	case err != nil:
		r.err = fmt.Errorf("reading %s: %w", listName, err)
		return got, false
	}
	if got.GetContinue() != "" {
		r.addUnread(listName)
	}
	return got, true
}

func (r *netReader) addUnread(what string) {
	if !slices.Contains(r.world.Unread, what) {
		r.world.Unread = append(r.world.Unread, what)
	}
}

func (r *netReader) readCluster(cluster dynamic.Interface, t nettrace.Target) {
	w := &r.world
	if l, ok := listForTrace(r, nettrace.Nodes, metav1.ListOptions{}, r.cs.CoreV1().Nodes().List); ok {
		w.Nodes = l.Items
	}
	if l, ok := listForTrace(r, nettrace.Namespaces, metav1.ListOptions{}, r.cs.CoreV1().Namespaces().List); ok {
		w.Namespaces = l.Items
	}
	if l, ok := listForTrace(r, nettrace.Services, metav1.ListOptions{}, r.cs.CoreV1().Services("").List); ok {
		w.Services = l.Items
	}
	if l, ok := listForTrace(r, nettrace.Policies, metav1.ListOptions{},
		r.cs.NetworkingV1().NetworkPolicies("").List); ok {
		w.Policies = l.Items
	}
	if ip, err := netip.ParseAddr(t.Host); err == nil {
		if l, ok := listForTrace(r, nettrace.Ranges, metav1.ListOptions{},
			r.cs.NetworkingV1().ServiceCIDRs().List); ok {
			w.Ranges = l.Items
		}
		o := metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("status.podIP", ip.String()).String()}
		if l, ok := listForTrace(r, nettrace.Pods, o, r.cs.CoreV1().Pods("").List); ok {
			w.Pods = l.Items
		}
	}
	for _, svc := range nettrace.TargetServices(w, t) {
		r.readEndpointSlices(svc.Namespace, svc.Name)
	}
	if t.Scheme != "" || nettrace.IsOutside(w, t) {
		r.readIngressObjects(cluster, t)
	}
	r.readEndpointPods()
	if _, err := netip.ParseAddr(t.Host); len(nettrace.TargetServices(w, t)) == 0 &&
		(err == nil && len(w.Pods) == 0 || nettrace.IsOutside(w, t)) {
		r.readReachability(t.Host)
	}
}

// readReachability requests from the agent of the pod's node whether the node can resolve a host
// outside the cluster, and has a route to it. It stores the response in r.world.Reach, which stays
// nil if the agent's release does not support the request.
func (r *netReader) readReachability(host string) {
	name := r.world.Pod.Spec.NodeName
	if r.err != nil || name == "" {
		return
	}
	raw, err := r.cs.CoreV1().RESTClient().Get().Resource("nodes").Name(name).SubResource("proxy").
		Suffix("keelson", "reach").Param("host", host).DoRaw(r.ctx)
	var answer nettrace.Reach
	switch {
	case apierrors.IsForbidden(err):
		r.addUnread("the routes of node " + name)
	case err == nil && json.Unmarshal(raw, &answer) == nil:
		r.world.Reach = &answer
	}
}

// readEndpointPods reads the pods to which the endpoints in r.world.Slices refer. If there are more
// than maxEndpointPods, or if the user may not read pods, it adds the list of pods to
// r.world.Unread.
func (r *netReader) readEndpointPods() {
	n := 0
	for _, s := range r.world.Slices {
		for _, e := range s.Endpoints {
			if e.TargetRef == nil || e.TargetRef.Kind != "Pod" || r.err != nil {
				continue
			}
			if n++; n > maxEndpointPods {
				r.addUnread(nettrace.Pods)
				return
			}
			p, err := r.cs.CoreV1().Pods(s.Namespace).Get(r.ctx, e.TargetRef.Name, metav1.GetOptions{})
			switch {
			case apierrors.IsForbidden(err):
				r.addUnread(nettrace.Pods)
				return
			case apierrors.IsNotFound(err): // a deleted pod; its endpoint will be removed
			case err != nil:
				r.err = fmt.Errorf("reading pod %s/%s: %w", s.Namespace, e.TargetRef.Name, err)
			default:
				r.world.Pods = append(r.world.Pods, *p)
			}
		}
	}
}
