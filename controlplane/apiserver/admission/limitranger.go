package admission

import (
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	utilerrors "k8s.io/apimachinery/pkg/util/errors"
	podresources "k8s.io/component-helpers/resource"

	"keelson.dev/keelson/controlplane/api"
)

// limitRangerAnnotation is the pod annotation that lists the values set from LimitRanges.
const limitRangerAnnotation = "kubernetes.io/limit-ranger"

// limits enforces the LimitRanges of a namespace on pods and PersistentVolumeClaims.
type limits struct {
	kind *api.Kind
	held func(ctx context.Context, k *api.Kind, namespace, resourceVersion string) ([]api.Object, error)
}

func newLimits(c Config) *limits {
	l := &limits{held: c.Held}
	if c.Kinds != nil {
		l.kind = c.Kinds.ByType(&corev1.LimitRange{})
	}
	return l
}

// each calls f for the LimitRanges of the attempt's namespace, in name order, until f returns an
// error.
func (l *limits) each(ctx context.Context, a *Attempt, f func(r *corev1.LimitRange) error) error {
	if l.kind == nil {
		return nil
	}
	all, err := l.held(ctx, l.kind, a.Namespace, "0")
	if err != nil {
		return asStatus(err)
	}
	for _, o := range all {
		if err := f(o.(*corev1.LimitRange)); err != nil {
			return err
		}
	}
	return nil
}

// fill sets the default requests and limits in the containers of a new pod.
func (l *limits) fill(ctx context.Context, a *Attempt) error {
	if !a.Is("pods") || !a.Creates() {
		return nil
	}
	pod := a.Whole.(*corev1.Pod)
	return l.each(ctx, a, func(r *corev1.LimitRange) error {
		fillPod(pod, r)
		return nil
	})
}

// hold rejects new pods, resized pods and claims that violate a LimitRange.
func (l *limits) hold(ctx context.Context, a *Attempt) error {
	if a.Whole == nil || a.Removes || a.Operation != api.Create && a.Operation != api.Update {
		return nil
	}
	if a.Stored != nil && a.Stored.GetDeletionTimestamp() != nil {
		return nil
	}
	var judge func(r *corev1.LimitRange) []error
	switch o := a.Whole.(type) {
	case *corev1.Pod:
		if !a.Creates() && a.Facet != "resize" {
			return nil // only a resize can change the resources of containers
		}
		was, _ := a.Stored.(*corev1.Pod)
		judge = func(r *corev1.LimitRange) []error { return podWithin(o, was, r) }
	case *corev1.PersistentVolumeClaim:
		if a.Facet != "" {
			return nil
		}
		was, _ := a.Stored.(*corev1.PersistentVolumeClaim)
		judge = func(r *corev1.LimitRange) []error { return claimWithin(o, was, r) }
	default:
		return nil
	}
	return l.each(ctx, a, func(r *corev1.LimitRange) error {
		if err := utilerrors.NewAggregate(judge(r)); err != nil {
			return forbid(a, a.Whole, err)
		}
		return nil
	})
}

// fillPod sets the defaults of a LimitRange in the containers of the pod. It lists them in the
// pod's annotation.
func fillPod(pod *corev1.Pod, r *corev1.LimitRange) {
	requests, limits := corev1.ResourceList{}, corev1.ResourceList{}
	for i := range r.Spec.Limits {
		if l := &r.Spec.Limits[i]; l.Type == corev1.LimitTypeContainer {
			merge(requests, l.DefaultRequest)
			merge(limits, l.Default)
		}
	}
	var set []string
	fill := func(what string, containers []corev1.Container) {
		for i := range containers {
			c := &containers[i]
			for _, part := range []struct {
				name     string
				to       *corev1.ResourceList
				defaults corev1.ResourceList
			}{{"request", &c.Resources.Requests, requests}, {"limit", &c.Resources.Limits, limits}} {
				if names := merged(part.to, part.defaults); len(names) > 0 {
					set = append(set, fmt.Sprintf("%s %s for %s %s", strings.Join(names, ", "), part.name, what, c.Name))
				}
			}
		}
	}
	fill("container", pod.Spec.Containers)
	fill("init container", pod.Spec.InitContainers)
	if len(set) > 0 {
		if pod.Annotations == nil {
			pod.Annotations = map[string]string{}
		}
		pod.Annotations[limitRangerAnnotation] = "LimitRanger plugin set: " + strings.Join(set, "; ")
	}
}

// merge copies the entries of from that are missing in to.
func merge(to, from corev1.ResourceList) {
	for name, q := range from {
		if _, ok := to[name]; !ok {
			to[name] = q.DeepCopy()
		}
	}
}

// merged copies the entries of from that are missing in to and returns their names.
func merged(to *corev1.ResourceList, from corev1.ResourceList) []string {
	var names []string
	for name, q := range from {
		if _, ok := (*to)[name]; ok {
			continue
		}
		if *to == nil {
			*to = corev1.ResourceList{}
		}
		(*to)[name] = q.DeepCopy()
		names = append(names, string(name))
	}
	slices.Sort(names)
	return names
}

// asked contains the requests and limits of a container, pod or claim. Unchanged values are not
// checked again, so that a newer LimitRange does not block unrelated updates.
type asked struct{ requests, limits corev1.ResourceList }

// same reports whether a and was have the same request and limit of the resource. It is false if
// was is nil.
func (a asked) same(was *asked, name corev1.ResourceName) bool {
	return was != nil && sameAmount(a.requests, was.requests, name) && sameAmount(a.limits, was.limits, name)
}

func sameAmount(a, b corev1.ResourceList, name corev1.ResourceName) bool {
	x, in := a[name]
	y, was := b[name]
	return in == was && x.Cmp(y) == 0
}

// containersOf returns the containers and init containers of a pod, to which limits apply.
func containersOf(pod *corev1.Pod) [][]corev1.Container {
	if pod == nil {
		return nil
	}
	return [][]corev1.Container{pod.Spec.Containers, pod.Spec.InitContainers}
}

// podWithin returns the violations of a LimitRange by a pod. was is the stored pod, nil for a new
// one.
func podWithin(pod, was *corev1.Pod, r *corev1.LimitRange) []error {
	before := map[string]*asked{}
	for _, list := range containersOf(was) {
		for i := range list {
			before[list[i].Name] = &asked{list[i].Resources.Requests, list[i].Resources.Limits}
		}
	}
	// As in Kubernetes, the limits do not include the pod overhead, which the pod does not choose.
	own := podresources.PodResourcesOptions{ExcludeOverhead: true}
	var whole *asked
	if was != nil {
		whole = &asked{podresources.PodRequests(was, own), podresources.PodLimits(was, own)}
	}
	var errs []error
	for i := range r.Spec.Limits {
		l := &r.Spec.Limits[i]
		switch l.Type {
		case corev1.LimitTypeContainer:
			for _, list := range containersOf(pod) {
				for j := range list {
					errs = append(errs, breaches(l, asked{list[j].Resources.Requests, list[j].Resources.Limits}, before[list[j].Name])...)
				}
			}
		case corev1.LimitTypePod:
			errs = append(errs, breaches(l, asked{podresources.PodRequests(pod, own), podresources.PodLimits(pod, own)}, whole)...)
		}
	}
	return errs
}

// claimWithin returns the violations of a LimitRange by a claim. was is the stored claim, nil for a
// new one.
func claimWithin(c, was *corev1.PersistentVolumeClaim, r *corev1.LimitRange) []error {
	var errs []error
	kept := func(name corev1.ResourceName) bool {
		return was != nil && sameAmount(c.Spec.Resources.Requests, was.Spec.Resources.Requests, name)
	}
	for i := range r.Spec.Limits {
		l := &r.Spec.Limits[i]
		if l.Type != corev1.LimitTypePersistentVolumeClaim {
			continue
		}
		for _, name := range names(l.Min) {
			if !kept(name) {
				errs = append(errs, atLeast(l, name, c.Spec.Resources.Requests, nil))
			}
		}
		for _, name := range names(l.Max) {
			if kept(name) {
				continue
			}
			most := l.Max[name]
			switch size, asked := c.Spec.Resources.Requests[name]; {
			case !asked:
				errs = append(errs, fmt.Errorf("maximum %s usage per %s is %s. No request is specified", name, l.Type, most.String()))
			case size.Cmp(most) > 0:
				errs = append(errs, fmt.Errorf("maximum %s usage per %s is %s, but request is %s", name, l.Type, most.String(), size.String()))
			}
		}
	}
	return slices.DeleteFunc(errs, func(err error) bool { return err == nil })
}

// breaches returns the violations of a limit by the resources of a container or pod. was contains
// its previous resources, nil if it is new.
func breaches(l *corev1.LimitRangeItem, now asked, was *asked) []error {
	var errs []error
	for _, part := range []struct {
		bounds corev1.ResourceList
		judge  func(l *corev1.LimitRangeItem, name corev1.ResourceName, requests, limits corev1.ResourceList) error
	}{{l.Min, atLeast}, {l.Max, atMost}, {l.MaxLimitRequestRatio, inRatio}} {
		for _, name := range names(part.bounds) {
			if !now.same(was, name) {
				errs = append(errs, part.judge(l, name, now.requests, now.limits))
			}
		}
	}
	return slices.DeleteFunc(errs, func(err error) bool { return err == nil })
}

func names(list corev1.ResourceList) []corev1.ResourceName {
	out := make([]corev1.ResourceName, 0, len(list))
	for name := range list {
		out = append(out, name)
	}
	slices.Sort(out)
	return out
}

func atLeast(l *corev1.LimitRangeItem, name corev1.ResourceName, requests, limits corev1.ResourceList) error {
	least := l.Min[name]
	request, asked := requests[name]
	limit, limited := limits[name]
	switch {
	case !asked:
		return fmt.Errorf("minimum %s usage per %s is %s. No request is specified", name, l.Type, least.String())
	case request.Cmp(least) < 0:
		return fmt.Errorf("minimum %s usage per %s is %s, but request is %s", name, l.Type, least.String(), request.String())
	case limited && limit.Cmp(least) < 0:
		return fmt.Errorf("minimum %s usage per %s is %s, but limit is %s", name, l.Type, least.String(), limit.String())
	}
	return nil
}

func atMost(l *corev1.LimitRangeItem, name corev1.ResourceName, requests, limits corev1.ResourceList) error {
	most := l.Max[name]
	request, asked := requests[name]
	limit, limited := limits[name]
	switch {
	case !limited:
		return fmt.Errorf("maximum %s usage per %s is %s. No limit is specified", name, l.Type, most.String())
	case limit.Cmp(most) > 0:
		return fmt.Errorf("maximum %s usage per %s is %s, but limit is %s", name, l.Type, most.String(), limit.String())
	case asked && request.Cmp(most) > 0:
		return fmt.Errorf("maximum %s usage per %s is %s, but request is %s", name, l.Type, most.String(), request.String())
	}
	return nil
}

func inRatio(l *corev1.LimitRangeItem, name corev1.ResourceName, requests, limits corev1.ResourceList) error {
	most := l.MaxLimitRequestRatio[name]
	request, asked := requests[name]
	limit, limited := limits[name]
	switch {
	case !asked || request.IsZero():
		return fmt.Errorf("%s max limit to request ratio per %s is %s, but no request is specified or request is 0", name, l.Type, most.String())
	case !limited || limit.IsZero():
		return fmt.Errorf("%s max limit to request ratio per %s is %s, but no limit is specified or limit is 0", name, l.Type, most.String())
	}
	ratio := approximate(limit) / approximate(request)
	if ratio > approximate(most) {
		return fmt.Errorf("%s max limit to request ratio per %s is %s, but provided ratio is %f", name, l.Type, most.String(), ratio)
	}
	return nil
}

func approximate(q resource.Quantity) float64 { return q.AsApproximateFloat64() }
