package kctl

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/kctl/why"
)

// listLimit is the maximum number of objects that kctl reads in one list request.
const listLimit = 5000

// whyReader reads the objects that an explanation of 'kctl why' needs into world.
type whyReader struct {
	ctx   context.Context
	cs    kubernetes.Interface
	world why.World
	err   error // the first error other than a missing permission; later reads do nothing
}

// listForWhy returns a list of at most listLimit objects, which it requests with the function list.
// listName is the name of the list in messages. If the user may not read the list or its kind is
// not served, ok is false and listName is added to r.world.Unread. listName is also added if the
// list is longer than listLimit; then ok is true. After any other error, r.err is set, and ok is
// false for this and all further calls.
func listForWhy[L metav1.ListInterface](r *whyReader, listName string, options metav1.ListOptions,
	list func(context.Context, metav1.ListOptions) (L, error)) (got L, ok bool) {
	if r.err != nil {
		return got, false
	}
	options.Limit = listLimit
	got, err := list(r.ctx, options)
	switch {
	case apierrors.IsForbidden(err), apierrors.IsNotFound(err): // NotFound: kind not served
		r.world.Unread = append(r.world.Unread, listName)
		return got, false
	case err != nil:
		r.err = fmt.Errorf("reading %s: %w", listName, err)
		return got, false
	}
	if got.GetContinue() != "" {
		r.world.Unread = append(r.world.Unread, fmt.Sprintf("%s after the first %d", listName, listLimit))
	}
	return got, true
}

// readFor reads the objects that are needed to explain subject into r.world.
func (r *whyReader) readFor(subject runtime.Object) {
	switch o := subject.(type) {
	case *corev1.Pod:
		r.readEvents(o.Namespace, fields.OneTermEqualSelector("involvedObject.uid", string(o.UID)).String())
		r.readDependencies(o.Namespace, []corev1.Pod{*o})
		r.readStatefulSet(o)
	case *appsv1.Deployment:
		options := metav1.ListOptions{LabelSelector: metav1.FormatLabelSelector(o.Spec.Selector)}
		if l, ok := listForWhy(r, why.ReplicaSets, options, r.cs.AppsV1().ReplicaSets(o.Namespace).List); ok {
			r.world.ReplicaSets = l.Items
		}
		r.readPods(o.Namespace, o.Spec.Selector)
	case *appsv1.ReplicaSet:
		r.readPods(o.Namespace, o.Spec.Selector)
	case *appsv1.StatefulSet:
		r.readPods(o.Namespace, o.Spec.Selector)
	case *appsv1.DaemonSet:
		r.readPods(o.Namespace, o.Spec.Selector)
	case *batchv1.Job:
		r.readPods(o.Namespace, o.Spec.Selector)
	case *autoscalingv2.HorizontalPodAutoscaler:
		r.readAutoscaled(o)
	case *corev1.PersistentVolumeClaim:
		if l, ok := listForWhy(r, why.Pods, metav1.ListOptions{}, r.cs.CoreV1().Pods(o.Namespace).List); ok {
			r.world.Pods = l.Items
		}
		if o.Status.Phase == corev1.ClaimBound {
			r.readAttachments(o)
			break
		}
		r.readEvents(o.Namespace, fields.OneTermEqualSelector("involvedObject.uid", string(o.UID)).String())
	case *corev1.Node:
		options := metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("spec.nodeName", o.Name).String()}
		if l, ok := listForWhy(r, why.Placed, options, r.cs.CoreV1().Pods("").List); ok {
			r.world.Placed = l.Items
		}
		if o.Spec.Unschedulable {
			if l, ok := listForWhy(r, why.Budgets, metav1.ListOptions{},
				r.cs.PolicyV1().PodDisruptionBudgets("").List); ok {
				r.world.Budgets = l.Items
			}
		}
	case *policyv1.PodDisruptionBudget:
		r.readPods(o.Namespace, o.Spec.Selector)
	case *corev1.Service:
		if len(o.Spec.Selector) > 0 {
			r.readPods(o.Namespace, nil)
		} else if l, ok := listForWhy(r, why.Nodes, metav1.ListOptions{}, r.cs.CoreV1().Nodes().List); ok {
			r.world.Nodes = l.Items
		}
		options := metav1.ListOptions{LabelSelector: labels.Set{discoveryv1.LabelServiceName: o.Name}.String()}
		if l, ok := listForWhy(r, why.Slices, options, r.cs.DiscoveryV1().EndpointSlices(o.Namespace).List); ok {
			r.world.Route.Slices = l.Items
		}
	case *networkingv1.Ingress:
		r.readIngress(o)
	case *discoveryv1.EndpointSlice:
		options := metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("metadata.name",
			o.Labels[discoveryv1.LabelServiceName]).String()}
		if l, ok := listForWhy(r, why.Services, options, r.cs.CoreV1().Services(o.Namespace).List); ok {
			r.world.Route.Services = l.Items
		}
	}
}

// readStatefulSet reads the StatefulSet that controls pod p into r.world.StatefulSet. It reads
// nothing if no StatefulSet controls p.
func (r *whyReader) readStatefulSet(p *corev1.Pod) {
	owner := metav1.GetControllerOf(p)
	if owner == nil || owner.Kind != "StatefulSet" {
		return
	}
	options := metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("metadata.name", owner.Name).String()}
	l, ok := listForWhy(r, why.Sets, options, r.cs.AppsV1().StatefulSets(p.Namespace).List)
	if ok && len(l.Items) == 1 && l.Items[0].UID == owner.UID {
		r.world.StatefulSet = &l.Items[0]
	}
}

// readAttachments reads the VolumeAttachments of the volume of claim c, the nodes, and the events
// of the namespace. These include the events of the pods that use the claim.
func (r *whyReader) readAttachments(c *corev1.PersistentVolumeClaim) {
	if l, ok := listForWhy(r, why.Attachments, metav1.ListOptions{}, r.cs.StorageV1().VolumeAttachments().List); ok {
		r.world.Attachments = slices.DeleteFunc(l.Items, func(a storagev1.VolumeAttachment) bool {
			return a.Spec.Source.PersistentVolumeName == nil || *a.Spec.Source.PersistentVolumeName != c.Spec.VolumeName
		})
	}
	if l, ok := listForWhy(r, why.Nodes, metav1.ListOptions{}, r.cs.CoreV1().Nodes().List); ok {
		r.world.Nodes = l.Items
	}
	r.readEvents(c.Namespace, "")
}

// readIngress reads the IngressClasses, Services and EndpointSlices for Ingress i. It reads only
// those Secrets that the TLS entries of i name.
func (r *whyReader) readIngress(i *networkingv1.Ingress) {
	if l, ok := listForWhy(r, why.Classes, metav1.ListOptions{}, r.cs.NetworkingV1().IngressClasses().List); ok {
		r.world.Route.Classes = l.Items
	}
	if l, ok := listForWhy(r, why.Services, metav1.ListOptions{}, r.cs.CoreV1().Services(i.Namespace).List); ok {
		r.world.Route.Services = l.Items
	}
	if l, ok := listForWhy(r, why.Slices, metav1.ListOptions{},
		r.cs.DiscoveryV1().EndpointSlices(i.Namespace).List); ok {
		r.world.Route.Slices = l.Items
	}
	for _, t := range i.Spec.TLS {
		options := metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("metadata.name",
			t.SecretName).String()}
		l, ok := listForWhy(r, why.Secrets, options, r.cs.CoreV1().Secrets(i.Namespace).List)
		if !ok {
			return
		}
		r.world.Route.Secrets = append(r.world.Route.Secrets, l.Items...)
	}
}

// readPods reads the pods of a namespace that selector matches, the events of the namespace, and
// the dependencies of the pods. A nil selector matches all pods.
func (r *whyReader) readPods(namespace string, selector *metav1.LabelSelector) {
	options := metav1.ListOptions{}
	if selector != nil {
		options.LabelSelector = metav1.FormatLabelSelector(selector)
	}
	if l, ok := listForWhy(r, why.Pods, options, r.cs.CoreV1().Pods(namespace).List); ok {
		r.world.Pods = l.Items
	}
	r.readEvents(namespace, "")
	r.readDependencies(namespace, r.world.Pods)
}

func (r *whyReader) readEvents(namespace, selector string) {
	if l, ok := listForWhy(r, why.Events, metav1.ListOptions{FieldSelector: selector},
		r.cs.CoreV1().Events(namespace).List); ok {
		r.world.Events = l.Items
	}
}

// readDependencies reads the nodes. For pods that are not scheduled, it also reads their claims,
// their PodGroups, and all running pods of the cluster. If no scheduler has handled a pod, it also
// reads the names of the schedulers.
func (r *whyReader) readDependencies(namespace string, pods []corev1.Pod) {
	if l, ok := listForWhy(r, why.Nodes, metav1.ListOptions{}, r.cs.CoreV1().Nodes().List); ok {
		r.world.Nodes = l.Items
	}
	waits, claims, grouped := false, false, false
	for _, p := range pods {
		waits = waits || p.Spec.NodeName == "" && p.DeletionTimestamp == nil
		grouped = grouped || p.Spec.NodeName == "" && p.Spec.SchedulingGroup != nil
		for _, v := range p.Spec.Volumes {
			claims = claims || v.PersistentVolumeClaim != nil || v.Ephemeral != nil
		}
	}
	if waits && claims {
		if l, ok := listForWhy(r, why.Claims, metav1.ListOptions{},
			r.cs.CoreV1().PersistentVolumeClaims(namespace).List); ok {
			r.world.Claims = l.Items
		}
	}
	if grouped {
		if l, ok := listForWhy(r, why.Groups, metav1.ListOptions{},
			r.cs.SchedulingV1beta1().PodGroups(namespace).List); ok {
			r.world.Group.Groups = l.Items
		}
		if l, ok := listForWhy(r, why.Mates, metav1.ListOptions{}, r.cs.CoreV1().Pods(namespace).List); ok {
			r.world.Group.Mates = l.Items
		}
	}
	if slices.ContainsFunc(pods, isUnseenByScheduler) {
		r.readSchedulers()
	}
	if waits {
		running := fields.ParseSelectorOrDie("spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed").String()
		if l, ok := listForWhy(r, why.Placed, metav1.ListOptions{FieldSelector: running},
			r.cs.CoreV1().Pods("").List); ok {
			r.world.Placed = l.Items
		}
	}
}

// isUnseenByScheduler reports whether pod p has neither a node nor a PodScheduled condition, so
// that no scheduler has handled it. It returns false for a pod that is being deleted.
func isUnseenByScheduler(p corev1.Pod) bool {
	return p.Spec.NodeName == "" && p.DeletionTimestamp == nil &&
		!slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
			return c.Type == corev1.PodScheduled
		})
}

// readSchedulers reads the scheduler names that the cluster's own scheduler serves. If the request
// fails, it adds why.Schedulers to r.world.Unread: many users lack the permission, and earlier
// releases do not report the names.
func (r *whyReader) readSchedulers() {
	if r.err != nil {
		return
	}
	raw, err := r.cs.CoreV1().RESTClient().Get().AbsPath(api.PathClusterStatus).Param("local", "true").DoRaw(r.ctx)
	var s api.ClusterStatus
	if err == nil {
		err = json.Unmarshal(raw, &s)
	}
	if err != nil {
		r.world.Unread = append(r.world.Unread, why.Schedulers)
		return
	}
	r.world.Group.Schedulers = s.Schedulers
}

// readAutoscaled reads the target of HorizontalPodAutoscaler h, the target's pods, and the names of
// those pods that have a usage sample in metrics.k8s.io.
func (r *whyReader) readAutoscaled(h *autoscalingv2.HorizontalPodAutoscaler) {
	r.readEvents(h.Namespace, fields.OneTermEqualSelector("involvedObject.uid", string(h.UID)).String())
	selector, ok := r.readScaleTarget(h)
	if !ok {
		r.world.Unread = append(r.world.Unread, why.Pods)
		return
	}
	options := metav1.ListOptions{LabelSelector: selector}
	if selector != "" {
		if l, ok := listForWhy(r, why.Pods, options, r.cs.CoreV1().Pods(h.Namespace).List); ok {
			r.world.Pods = l.Items
		}
	}
	if r.err != nil {
		return
	}
	var measured struct {
		Items []metav1.PartialObjectMetadata
	}
	raw,
		err := r.cs.CoreV1().RESTClient().Get().AbsPath("/apis/metrics.k8s.io/v1beta1/namespaces", h.Namespace,
		"pods").VersionedParams(&options, scheme.ParameterCodec).DoRaw(r.ctx)
	if err == nil {
		err = json.Unmarshal(raw, &measured)
	}
	switch {
	case apierrors.IsForbidden(err):
		r.world.Unread = append(r.world.Unread, why.PodMetrics)
	case err != nil:
		r.world.Scale.NotServed = err.Error()
	}
	for _, m := range measured.Items {
		r.world.Scale.Measured = append(r.world.Scale.Measured, m.Name)
	}
}

// readScaleTarget reads all objects of the kind that HorizontalPodAutoscaler h scales into
// r.world.Scale.Scaled. It returns the pod selector of the target, or "" if the target does not
// exist. ok is false if the kind is not supported, or if the objects could not be read.
func (r *whyReader) readScaleTarget(h *autoscalingv2.HorizontalPodAutoscaler) (selector string, ok bool) {
	var all runtime.Object
	ref := h.Spec.ScaleTargetRef
	switch apps := r.cs.AppsV1(); ref.APIVersion + " " + ref.Kind {
	case "apps/v1 Deployment":
		all, ok = listForWhy(r, why.Target, metav1.ListOptions{}, apps.Deployments(h.Namespace).List)
	case "apps/v1 StatefulSet":
		all, ok = listForWhy(r, why.Target, metav1.ListOptions{}, apps.StatefulSets(h.Namespace).List)
	case "apps/v1 ReplicaSet":
		all, ok = listForWhy(r, why.Target, metav1.ListOptions{}, apps.ReplicaSets(h.Namespace).List)
	}
	if !ok {
		return "", false
	}
	t := why.Scaled{Kind: strings.ToLower(ref.Kind)}
	is := func(name string, of *metav1.LabelSelector) {
		t.Others = append(t.Others, name)
		if name == ref.Name {
			t.Found, selector = true, metav1.FormatLabelSelector(of)
		}
	}
	_ = meta.EachListItem(all, func(o runtime.Object) error {
		switch o := o.(type) {
		case *appsv1.Deployment:
			is(o.Name, o.Spec.Selector)
		case *appsv1.StatefulSet:
			is(o.Name, o.Spec.Selector)
		case *appsv1.ReplicaSet:
			is(o.Name, o.Spec.Selector)
		}
		return nil
	})
	r.world.Scale.Scaled = &t
	return selector, true
}
