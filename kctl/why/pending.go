package why

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	requests "k8s.io/component-helpers/resource"
	scheduling "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/nodefeatures"
)

// explainUnscheduled returns the Finding for a pod without a node. The reason is the first of these
// that applies: scheduling gates, its claims, its PodGroup, a preemption that is not complete, or
// the scheduler's message. With the scheduler's message, the Finding also contains the smallest
// changes after which the pod would fit on a node.
func (w placementExplainer) explainUnscheduled(p *corev1.Pod) Finding {
	f := Finding{Object: objectName("pod", p), What: "has no node", Since: timeOrNil(p.CreationTimestamp)}
	c := api.PodCondition(p, corev1.PodScheduled)
	if c != nil {
		f.Since = timeOrNil(c.LastTransitionTime)
	}
	if len(p.Spec.SchedulingGates) > 0 {
		var gates []string
		for _, g := range p.Spec.SchedulingGates {
			gates = append(gates, g.Name)
		}
		f.Because = "it is held back by " + countNoun(len(gates), "scheduling gate") + ": " + strings.Join(gates, ", ")
		f.Details = []string{"who has set a gate takes it away when its condition is met; by hand:"}
		f.Mend = []string{kctlCommand(p,
			`patch pod %s --type=json -p '[{"op":"remove","path":"/spec/schedulingGates"}]'`, p.Name)}
		return f
	}
	if w.explainPodClaims(p, &f) || w.explainPodGroup(p, &f) {
		return f
	}
	if n := p.Status.NominatedNodeName; n != "" {
		f.Because = fmt.Sprintf("pods of lower priority give way to it on node %s: it goes there when they have ended",
			n)
		f.Mend = []string{"kctl get pods -A --field-selector=spec.nodeName=" + n}
		return f
	}
	message := ""
	if c != nil && c.Status == corev1.ConditionFalse {
		message = c.Message
	} else if e := w.world.newestEvent(p.UID, "FailedScheduling"); e != nil {
		message = e.Message
	}
	if message == "" {
		s := cmp.Or(p.Spec.SchedulerName, corev1.DefaultSchedulerName)
		f.Because = fmt.Sprintf("the scheduler %q has said nothing of it yet", s)
		f.Mend = []string{"kctl cluster status"}
		switch {
		case len(w.world.Group.Schedulers) > 0 && !slices.Contains(w.world.Group.Schedulers, s):
			f.Because = fmt.Sprintf("it is for the scheduler %q, which this cluster does not serve itself, and no "+
				"other has bound it", s)
			f.Details = []string{"served here: " + strings.Join(boundList(w.world.Group.Schedulers), ", "),
				"a second scheduler of that name must run, or recreate the pod with a " +
					"spec.schedulerName that is served"}
			f.Mend = []string{"kctl get pods -A | grep " + shellWord(s) + "   # does it run?"}
		case s != corev1.DefaultSchedulerName && len(w.world.Group.Schedulers) == 0:
			f.Details = []string{"a pod that names a scheduler of its own waits until one of that name runs"}
			f.Mend = []string{"kctl get pods -A | grep " + shellWord(s) + "   # does it run?"}
		}
		return f
	}
	message = groupReason(p, message, &f)
	of := f.Details
	f.Because, f.Details = parseRefusals(message)
	f.Details = append(f.Details, of...)
	if len(f.Mend) == 0 { // otherwise another pod prevents the scheduling
		w.explainNearest(p, &f)
	}
	return f
}

// explainPodClaims fills Finding f and returns true if a PersistentVolumeClaim prevents the
// scheduling of pod p. Such a claim is missing, is being deleted, or has lost its volume. A claim
// of an ephemeral volume that p does not control prevents it as well. Otherwise explainPodClaims
// returns false.
func (w placementExplainer) explainPodClaims(p *corev1.Pod, f *Finding) bool {
	if !w.world.hasList(Claims) {
		return false
	}
	for _, v := range p.Spec.Volumes {
		claim := ""
		if v.PersistentVolumeClaim != nil {
			claim = v.PersistentVolumeClaim.ClaimName
		} else if v.Ephemeral != nil {
			claim = p.Name + "-" + v.Name
		}
		if claim == "" {
			continue
		}
		i := slices.IndexFunc(w.world.Claims, func(c corev1.PersistentVolumeClaim) bool {
			return c.Name == claim && c.Namespace == p.Namespace
		})
		switch {
		case i < 0 && v.Ephemeral != nil:
			f.Because = fmt.Sprintf("persistentvolumeclaim %q of its ephemeral volume %q is still to be made", claim,
				v.Name)
			if e := w.world.newestEvent(p.UID, "FailedBinding"); e != nil {
				f.Because = singleLine(e.Message)
			}
			f.Mend = []string{kctlCommand(p, "describe resourcequotas"), "kctl cluster status   # the leader makes it"}
			return true
		case v.Ephemeral != nil && !metav1.IsControlledBy(&w.world.Claims[i], p):
			f.Because = fmt.Sprintf("persistentvolumeclaim %q, which its ephemeral volume %q wants, was made by "+
				"somebody else", claim, v.Name)
			f.Mend = []string{kctlCommand(p, "delete persistentvolumeclaim %s   # when its data is not needed; or "+
				"give the pod another name", claim)}
			return true
		case i < 0:
			f.Because = fmt.Sprintf("its volume %q wants persistentvolumeclaim %q, which does not exist", v.Name, claim)
			if near := nearestWord(claim, claimNames(w.world.Claims)); near != "" {
				f.Details = append(f.Details, fmt.Sprintf("the namespace has one named %q", near))
			}
			f.Mend = []string{kctlCommand(p, "apply -f CLAIM.yaml   # a persistentvolumeclaim named %s", claim)}
			return true
		case w.world.Claims[i].DeletionTimestamp != nil:
			f.Because = fmt.Sprintf("its persistentvolumeclaim %q is being deleted", claim)
			f.Mend = []string{kctlCommand(p, "why persistentvolumeclaim/%s", claim)}
			return true
		case w.world.Claims[i].Status.Phase == corev1.ClaimLost:
			f.Because = fmt.Sprintf("its persistentvolumeclaim %q has lost its volume", claim)
			f.Mend = []string{kctlCommand(p, "why persistentvolumeclaim/%s", claim)}
			return true
		}
	}
	return false
}

func claimNames(claims []corev1.PersistentVolumeClaim) []string {
	var out []string
	for _, c := range claims {
		out = append(out, c.Name)
	}
	return out
}

// parseRefusals parses the scheduler's message "N nodes are available: ...". It returns the part
// before the colon, and the reasons with their number of nodes, the most frequent reason first. For
// any other message it returns the whole message and no reasons.
func parseRefusals(message string) (sum string, reasons []string) {
	message = singleLine(message)
	message, post, _ := strings.Cut(message, " preemption: ")
	sum, rest, ok := strings.Cut(strings.TrimSuffix(message, "."), ": ")
	if !ok || !strings.HasSuffix(sum, "nodes are available") {
		return message, nil
	}
	type refusal struct {
		nodes int
		text  string
	}
	var all []refusal
	for _, part := range strings.Split(rest, ", ") {
		count, text, _ := strings.Cut(part, " ")
		n, err := strconv.Atoi(count)
		switch {
		case err == nil:
			all = append(all, refusal{n, text})
		case len(all) > 0: // the reason contains a comma
			all[len(all)-1].text += ", " + part
		default:
			return "no node helps: " + rest, nil
		}
	}
	slices.SortStableFunc(all, func(a, b refusal) int {
		return cmp.Or(cmp.Compare(b.nodes, a.nodes), strings.Compare(a.text, b.text))
	})
	for _, r := range all {
		reasons = append(reasons, countNoun(r.nodes, "node")+": "+strings.TrimPrefix(r.text, "node(s) "))
	}
	reasons = boundList(reasons)
	if strings.HasPrefix(post, "not eligible") {
		reasons = append(reasons, "preemption: "+strings.TrimSuffix(post, "."))
	}
	return sum, reasons
}

// obstacle is a reason why a pod cannot run on a node, with a command that removes the reason.
type obstacle struct {
	text, mend string
	weight     float64 // the size of the necessary change; higher is larger
}

// explainNearest adds to f, the Finding about the unscheduled pod p, the node that requires the
// smallest changes before it can run the pod. It also adds the commands for these changes.
func (w placementExplainer) explainNearest(p *corev1.Pod, f *Finding) {
	if !w.world.hasList(Nodes) {
		return
	}
	if len(w.world.Nodes) == 0 {
		f.Mend = []string{"kctl cluster token create --role node   # the cluster has no node: let one join"}
		return
	}
	var best *corev1.Node
	var bestObstacles []obstacle
	least := 0.0
	for i := range w.world.Nodes {
		n := &w.world.Nodes[i]
		all := w.nodeObstacles(p, n)
		sum := 0.0
		for _, o := range all {
			sum += o.weight
		}
		if len(all) > 0 && (best == nil || sum < least || sum == least && n.Name < best.Name) {
			best, bestObstacles, least = n, all, sum
		}
	}
	if best == nil {
		f.Details = append(f.Details, "what keeps it off is not a matter of taints, selectors or room")
		f.Mend = []string{kctlCommand(p, "describe pod %s", p.Name)}
		return
	}
	for i, o := range bestObstacles {
		lead := "the nearest is node " + best.Name + ": "
		if i > 0 {
			lead = "and there: "
		}
		f.Details = append(f.Details, lead+o.text)
		f.Mend = append(f.Mend, o.mend)
	}
}

// nodeObstacles returns the reasons why pod p cannot run on node n: cordon, taints, node selector,
// node affinity, missing features and resources. It returns nil if there is no such reason.
func (w placementExplainer) nodeObstacles(p *corev1.Pod, n *corev1.Node) []obstacle {
	var out []obstacle
	unschedulable := corev1.Taint{Key: corev1.TaintNodeUnschedulable, Effect: corev1.TaintEffectNoSchedule}
	if n.Spec.Unschedulable && !toleratesTaint(p, &unschedulable) {
		out = append(out, obstacle{"it is cordoned", "kctl uncordon " + n.Name, 1})
	}
	for i := range n.Spec.Taints {
		t := &n.Spec.Taints[i]
		if t.Effect == corev1.TaintEffectPreferNoSchedule || toleratesTaint(p, t) ||
			t.Key == corev1.TaintNodeUnschedulable {
			continue
		}
		o := obstacle{"it has taint " + t.ToString() + ", which the pod does not tolerate",
			fmt.Sprintf("kctl taint node %s %s:%s-   # or give the pod a toleration", n.Name, t.Key, t.Effect), 1}
		if strings.HasPrefix(t.Key, "node.kubernetes.io/") { // set by a controller, not by a user
			o.mend, o.weight = "kctl why node/"+n.Name, 2
		}
		out = append(out, o)
	}
	if ok, err := nodeaffinity.GetRequiredNodeAffinity(p).Match(n); err != nil || !ok {
		out = append(out, w.selectorObstacle(p, n))
	}
	if missing := nodefeatures.Missing(nodefeatures.RequiredToRun(&p.Spec), n); len(missing) > 0 {
		out = append(out, obstacle{"its agent does not declare " + nodefeatures.List(missing) +
			", which the pod needs: its release may be too old", "kctl cluster upgrade", 2})
	}
	return append(out, w.resourceObstacles(p, n)...)
}

func toleratesTaint(p *corev1.Pod, t *corev1.Taint) bool {
	return scheduling.TolerationsTolerateTaint(logr.Discard(), p.Spec.Tolerations, t, false)
}

// selectorObstacle returns the obstacle for node n, which the node selector or the required node
// affinity of pod p excludes.
func (w placementExplainer) selectorObstacle(p *corev1.Pod, n *corev1.Node) obstacle {
	var want, have []string
	for k, v := range p.Spec.NodeSelector {
		if got, ok := n.Labels[k]; got != v || !ok {
			want = append(want, k+"="+v)
			if ok {
				have = append(have, k+"="+got)
			}
		}
	}
	if len(want) == 0 {
		return obstacle{"its labels do not match the pod's required node affinity",
			"kctl label node " + n.Name + " KEY=VALUE", 1.5}
	}
	slices.Sort(want)
	slices.Sort(have)
	text := "the pod selects nodes with " + strings.Join(want, ", ")
	overwrite := ""
	if len(have) > 0 {
		text += "; it has " + strings.Join(have, ", ")
		overwrite = " --overwrite"
	}
	return obstacle{text, "kctl label node " + n.Name + " " + strings.Join(want, " ") + overwrite, 1.5}
}

// resourceObstacles returns an obstacle for each resource of which node n has less free than pod p
// requests. If the pods of all namespaces could not be read, the node counts as empty. Then only a
// pod that is larger than the whole node is reported.
func (w placementExplainer) resourceObstacles(p *corev1.Pod, n *corev1.Node) []obstacle {
	asked := requests.PodRequests(p, requests.PodResourcesOptions{})
	asked[corev1.ResourcePods] = *resource.NewQuantity(1, resource.DecimalSI)
	used := corev1.ResourceList{}
	for i := range w.world.Placed {
		q := &w.world.Placed[i]
		if q.Spec.NodeName != n.Name || api.IsPodTerminal(q) {
			continue
		}
		of := requests.PodRequests(q, requests.PodResourcesOptions{})
		of[corev1.ResourcePods] = *resource.NewQuantity(1, resource.DecimalSI)
		for r, v := range of {
			sum := used[r]
			sum.Add(v)
			used[r] = sum
		}
	}
	var names []string
	for r := range asked {
		names = append(names, string(r))
	}
	slices.Sort(names)
	var out []obstacle
	for _, r := range names {
		want, have := asked[corev1.ResourceName(r)], n.Status.Allocatable[corev1.ResourceName(r)]
		free := have.DeepCopy()
		free.Sub(used[corev1.ResourceName(r)])
		if want.IsZero() || want.Cmp(free) <= 0 {
			continue
		}
		if free.Sign() < 0 {
			free = resource.Quantity{}
		}
		o := obstacle{weight: 1 + missingShare(want, free)}
		if want.Cmp(have) > 0 {
			o.text = fmt.Sprintf("the pod asks for %s %s, and the whole node has %s", want.String(), r, have.String())
			o.weight += 2
		} else {
			o.text = fmt.Sprintf("the pod asks for %s %s, and %s of %s are free", want.String(), r,
				free.String(), have.String())
		}
		o.mend = lowerRequestCommand(p, r, free)
		out = append(out, o)
	}
	return out
}

// missingShare returns the share of want that exceeds free, from 0 to 1.
func missingShare(want, free resource.Quantity) float64 {
	return 1 - free.AsApproximateFloat64()/want.AsApproximateFloat64()
}

// lowerRequestCommand returns a command after which pod p would fit on a node with the amount free
// of resource r. It lowers the request in the pod's template if possible. Otherwise it adds a node.
func lowerRequestCommand(p *corev1.Pod, r string, free resource.Quantity) string {
	owner := templateOwner(p)
	if owner == "" || r == string(corev1.ResourcePods) || free.IsZero() || len(p.Spec.Containers) != 1 ||
		p.Spec.Resources != nil {
		return "kctl cluster token create --role node   # another node; or remove pods that are not needed"
	}
	return kctlCommand(p, "set resources %s --requests=%s=%s   # or let another node join", owner, r, free.String())
}
