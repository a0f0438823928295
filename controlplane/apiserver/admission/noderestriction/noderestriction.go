// Package noderestriction contains the admission plugins that restrict what a node agent may write,
// including the tokens that it requests, its mirror pods and the addresses that it reports.
package noderestriction

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/dynamic-resource-allocation/resourceclaim"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/podaddress"
	"keelson.dev/keelson/controlplane/api/podref"
	"keelson.dev/keelson/controlplane/apiserver/admission"
)

// Config contains the dependencies of the plugins that restrict nodes.
type Config struct {
	Cluster admission.Cluster
	Kinds   *api.Kinds
	// NodeOf returns the node name of a user that is a node agent.
	NodeOf func(u api.User) (string, bool)
	// PodAddresses returns the index that checks the addresses that nodes report for pods. Without
	// the function or the index, all addresses are accepted.
	PodAddresses func() *podaddress.Index
	// AddressRefused is called when a node's report about a Pod or Node is rejected because of an
	// address. It may be nil. The callee must not change the object.
	AddressRefused func(about api.Object, why error)
}

// Restrict returns a plugin that limits an agent's writes to its own node and the objects of this
// node. It checks the content of objects, which the authorizer cannot see.
func Restrict(c Config) func(ctx context.Context, a *api.Attempt) error {
	return func(ctx context.Context, a *api.Attempt) error {
		node, ok := c.NodeOf(a.User)
		if !ok {
			return nil
		}
		if err := restrictFinalizers(a, node); err != nil {
			return err
		}
		switch a.Kind.GVK.Group + "/" + a.Kind.Resource {
		case "/pods":
			return restrictPod(ctx, c, a, node)
		case "/nodes":
			return restrictNode(ctx, c, a, node)
		case "/serviceaccounts":
			if a.Facet == "token" {
				return restrictToken(ctx, c.Cluster, a, node)
			}
		case "resource.k8s.io/resourceslices":
			return restrictSlice(a, node)
		case "coordination.k8s.io/leases", "storage.k8s.io/csinodes":
			if a.Whole != nil && a.Whole.GetName() != node {
				return admission.NewForbidden(a, a.Whole,
					fmt.Errorf("can only access %s with the same name as the requesting node", a.Kind.Resource))
			}
		}
		return nil
	}
}

// podAddresses returns the index that checks addresses. A nil index accepts all addresses.
func (c Config) podAddresses() *podaddress.Index {
	if c.PodAddresses == nil {
		return nil
	}
	return c.PodAddresses()
}

// restrictFinalizers rejects changes of finalizers by a node. Otherwise a node could block its own
// deletion or that of its pods. No agent needs finalizers.
func restrictFinalizers(a *api.Attempt, node string) error {
	obj, old := a.Whole, a.Stored
	if obj == nil {
		return nil
	}
	var before []string
	if old != nil {
		before = old.GetFinalizers()
	}
	if slices.Equal(obj.GetFinalizers(), before) {
		return nil
	}
	return admission.NewForbidden(a, obj, fmt.Errorf("node %q is not allowed to modify finalizers", node))
}

func restrictPod(ctx context.Context, c Config, a *api.Attempt, node string) error {
	before, _ := a.Stored.(*corev1.Pod)
	switch {
	case a.Operation == api.Delete:
		if before.Spec.NodeName != node {
			return admission.NewForbidden(a, before,
				fmt.Errorf("node %q can only delete pods with spec.nodeName set to itself", node))
		}
	case a.Operation == api.Connect:
		return admission.NewForbidden(a, before,
			fmt.Errorf("unexpected operation %q, node %q can only create and delete mirror pods", a.Operation, node))
	case a.CreatesObject():
		return requireMirrorPod(a, node, a.Whole.(*corev1.Pod))
	case a.Facet == "eviction":
		if before.Spec.NodeName != node {
			return admission.NewForbidden(a, before,
				fmt.Errorf("node %q can only evict pods with spec.nodeName set to itself", node))
		}
	case a.Facet == "status":
		if before.Spec.NodeName != node {
			return admission.NewForbidden(a, before,
				fmt.Errorf("node %q can only update pod status for pods with spec.nodeName set to itself", node))
		}
		if !maps.Equal(a.Whole.GetLabels(), before.Labels) {
			return admission.NewForbidden(a, before,
				fmt.Errorf("node %q cannot update labels through pod status", node))
		}
		if now, ok := a.Whole.(*corev1.Pod); ok &&
			!resourceclaim.PodStatusEqual(now.Status.ResourceClaimStatuses, before.Status.ResourceClaimStatuses) {
			return admission.NewForbidden(a, before, fmt.Errorf("node %q cannot update resource claim statuses", node))
		}
		if now, ok := a.Whole.(*corev1.Pod); ok {
			return c.checkPodAddresses(ctx, a, before, now)
		}
	}
	return nil
}

// restrictSlice allows a node to write only ResourceSlices of its own devices.
func restrictSlice(a *api.Attempt, node string) error {
	for _, o := range []api.Object{a.Whole, a.Stored} {
		s, ok := o.(*resourcev1.ResourceSlice)
		if ok && (s.Spec.NodeName == nil || *s.Spec.NodeName != node) {
			return admission.NewForbidden(a, s,
				fmt.Errorf("node %q can only write ResourceSlices with spec.nodeName set to itself", node))
		}
	}
	return nil
}

// requireMirrorPod returns an error unless the pod is a mirror pod that is bound to this node.
func requireMirrorPod(a *api.Attempt, node string, pod *corev1.Pod) error {
	if !podref.IsMirror(pod) {
		return admission.NewForbidden(a, pod,
			fmt.Errorf("pod does not have %q annotation, node %q can only create mirror pods",
				corev1.MirrorPodAnnotationKey, node))
	}
	if pod.Spec.NodeName != node {
		return admission.NewForbidden(a, pod,
			fmt.Errorf("node %q can only create pods with spec.nodeName set to itself", node))
	}
	return nil
}

// ownLabels are the labels in the domains kubernetes.io and k8s.io that an agent may set on its own
// Node object.
var ownLabels = []string{
	corev1.LabelHostname, corev1.LabelTopologyZone, corev1.LabelTopologyRegion,
	corev1.LabelFailureDomainBetaZone, corev1.LabelFailureDomainBetaRegion,
	corev1.LabelInstanceType, corev1.LabelInstanceTypeStable,
	corev1.LabelOSStable, corev1.LabelArchStable, "beta.kubernetes.io/os", "beta.kubernetes.io/arch",
	corev1.LabelWindowsBuild,
}

func restrictNode(ctx context.Context, c Config, a *api.Attempt, node string) error {
	obj, old := a.Whole, a.Stored
	if obj == nil {
		return admission.NewForbidden(a, old, fmt.Errorf("node %q is not allowed to delete nodes", node))
	}
	if obj.GetName() != node {
		return admission.NewForbidden(a, obj, fmt.Errorf("node %q is not allowed to modify node %q", node,
			obj.GetName()))
	}
	n := obj.(*corev1.Node)
	var had, noted map[string]string
	var spec corev1.NodeSpec
	if before, ok := old.(*corev1.Node); ok {
		had, noted, spec = before.Labels, before.Annotations, before.Spec
		if a.Facet == "" && !equality.Semantic.DeepEqual(n.Spec.Taints, before.Spec.Taints) {
			return admission.NewForbidden(a, obj, fmt.Errorf("node %q is not allowed to modify taints", node))
		}
		if !equality.Semantic.DeepEqual(n.OwnerReferences, before.OwnerReferences) {
			return admission.NewForbidden(a, obj, fmt.Errorf("node %q is not allowed to modify ownerReferences", node))
		}
	}
	// Other nodes route the traffic for these ranges to the node that has them.
	if n.Spec.PodCIDR != spec.PodCIDR || !slices.Equal(n.Spec.PodCIDRs, spec.PodCIDRs) {
		return admission.NewForbidden(a, obj, fmt.Errorf("node %q is not allowed to choose its podCIDRs", node))
	}
	before, _ := old.(*corev1.Node)
	if err := c.checkMachineAddresses(ctx, a, before, n); err != nil {
		return err
	}
	var bad []string
	for key := range changedLabels(n.Labels, had) {
		if !mayChangeLabel(key) {
			bad = append(bad, key)
		}
	}
	if len(bad) > 0 {
		slices.Sort(bad)
		return admission.NewForbidden(a, obj, fmt.Errorf("is not allowed to modify labels: %s",
			strings.Join(bad, ", ")))
	}
	for key := range changedLabels(n.Annotations, noted) {
		if slices.Contains(kctlAnnotations, key) {
			return admission.NewForbidden(a, obj, fmt.Errorf("is not allowed to modify annotation %s, which kctl uses",
				key))
		}
	}
	return nil
}

// kctlAnnotations lists the annotations that a node may not change on its Node object. 'kctl
// cluster' uses them to decide which labels and taints it removes and which nodes it drains.
var kctlAnnotations = []string{api.AnnotationClusterFile, api.AnnotationUpgradeDrain}

func changedLabels(newLabels, oldLabels map[string]string) map[string]bool {
	out := map[string]bool{}
	for k, v := range newLabels {
		if b, ok := oldLabels[k]; !ok || b != v {
			out[k] = true
		}
	}
	for k := range oldLabels {
		if _, ok := newLabels[k]; !ok {
			out[k] = true
		}
	}
	return out
}

func mayChangeLabel(key string) bool {
	domain, _, ok := strings.Cut(key, "/")
	if !ok {
		return true
	}
	under := func(d string) bool { return domain == d || strings.HasSuffix(domain, "."+d) }
	switch {
	case under("kubelet.kubernetes.io"), under("node.kubernetes.io"):
		return true
	case under("node-restriction.kubernetes.io"):
		return false
	case under("kubernetes.io"), under("k8s.io"):
		return slices.Contains(ownLabels, key)
	}
	return true
}
