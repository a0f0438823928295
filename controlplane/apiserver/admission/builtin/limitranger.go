package builtin

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
	"keelson.dev/keelson/controlplane/apiserver/admission"
)

// limitRangerAnnotation is the pod annotation that lists the values set from LimitRanges.
const limitRangerAnnotation = "kubernetes.io/limit-ranger"

// limitRanger enforces the LimitRanges of a namespace on pods and PersistentVolumeClaims.
type limitRanger struct {
	kind     *api.Kind
	listHeld func(ctx context.Context, k *api.Kind, namespace, resourceVersion string) ([]api.Object, error)
}

func newLimitRanger(c Config) *limitRanger {
	l := &limitRanger{listHeld: c.ListHeld}
	if c.Kinds != nil {
		l.kind = c.Kinds.ByType(&corev1.LimitRange{})
	}
	return l
}

// forEachRange calls visit for the LimitRanges of the attempt's namespace, in name order, until
// visit returns an error.
func (l *limitRanger) forEachRange(
	ctx context.Context, a *admission.Attempt, visit func(r *corev1.LimitRange) error,
) error {
	if l.kind == nil {
		return nil
	}
	all, err := l.listHeld(ctx, l.kind, a.Namespace, "0")
	if err != nil {
		return admission.AsStatus(err)
	}
	for _, o := range all {
		if err := visit(o.(*corev1.LimitRange)); err != nil {
			return err
		}
	}
	return nil
}

// setDefaultResources sets the default requests and limits in the containers of a new pod.
func (l *limitRanger) setDefaultResources(ctx context.Context, a *admission.Attempt) error {
	if !a.IsCoreResource("pods") || !a.CreatesObject() {
		return nil
	}
	pod := a.Whole.(*corev1.Pod)
	return l.forEachRange(ctx, a, func(r *corev1.LimitRange) error {
		fillPod(pod, r)
		return nil
	})
}

// enforceLimits rejects new pods, resized pods and claims that violate a LimitRange.
func (l *limitRanger) enforceLimits(ctx context.Context, a *admission.Attempt) error {
	if a.Whole == nil || a.Removes || a.Operation != api.Create && a.Operation != api.Update {
		return nil
	}
	if a.Stored != nil && a.Stored.GetDeletionTimestamp() != nil {
		return nil
	}
	var judge func(r *corev1.LimitRange) []error
	switch o := a.Whole.(type) {
	case *corev1.Pod:
		if !a.CreatesObject() && a.Facet != "resize" {
			return nil // only a resize can change the resources of containers
		}
		was, _ := a.Stored.(*corev1.Pod)
		judge = func(r *corev1.LimitRange) []error { return podViolations(o, was, r) }
	case *corev1.PersistentVolumeClaim:
		if a.Facet != "" {
			return nil
		}
		was, _ := a.Stored.(*corev1.PersistentVolumeClaim)
		judge = func(r *corev1.LimitRange) []error { return claimViolations(o, was, r) }
	default:
		return nil
	}
	return l.forEachRange(ctx, a, func(r *corev1.LimitRange) error {
		if err := utilerrors.NewAggregate(judge(r)); err != nil {
			return admission.NewForbidden(a, a.Whole, err)
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
			mergeMissing(requests, l.DefaultRequest)
			mergeMissing(limits, l.Default)
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
				if names := mergeNew(part.to, part.defaults); len(names) > 0 {
					set = append(set, fmt.Sprintf("%s %s for %s %s", strings.Join(names, ", "),
						part.name, what, c.Name))
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

// mergeMissing copies the entries of source that are missing in target.
func mergeMissing(target, source corev1.ResourceList) {
	for name, q := range source {
		if _, ok := target[name]; !ok {
			target[name] = q.DeepCopy()
		}
	}
}

// mergeNew copies the entries of source that are missing in target and returns the names of the
// copied entries.
func mergeNew(target *corev1.ResourceList, source corev1.ResourceList) []string {
	var names []string
	for name, q := range source {
		if _, ok := (*target)[name]; ok {
			continue
		}
		if *target == nil {
			*target = corev1.ResourceList{}
		}
		(*target)[name] = q.DeepCopy()
		names = append(names, string(name))
	}
	slices.Sort(names)
	return names
}

// resourceRequest contains the requests and limits of a container, pod or claim. Values that an
// update leaves unchanged are not checked, so that a newer LimitRange does not block unrelated
// updates.
type resourceRequest struct{ requests, limits corev1.ResourceList }

// equalFor reports whether a and old have the same request and limit of the resource. It is false
// if old is nil.
func (a resourceRequest) equalFor(old *resourceRequest, name corev1.ResourceName) bool {
	return old != nil && sameAmount(a.requests, old.requests, name) && sameAmount(a.limits, old.limits, name)
}

func sameAmount(a, b corev1.ResourceList, name corev1.ResourceName) bool {
	x, in := a[name]
	y, was := b[name]
	return in == was && x.Cmp(y) == 0
}

// containersOf returns the containers and the init containers of a pod as two lists. LimitRanges
// apply to both.
func containersOf(pod *corev1.Pod) [][]corev1.Container {
	if pod == nil {
		return nil
	}
	return [][]corev1.Container{pod.Spec.Containers, pod.Spec.InitContainers}
}

// podViolations returns the violations of a LimitRange by a pod. old is the stored pod; nil if the
// pod is new.
func podViolations(pod, old *corev1.Pod, r *corev1.LimitRange) []error {
	before := map[string]*resourceRequest{}
	for _, list := range containersOf(old) {
		for i := range list {
			before[list[i].Name] = &resourceRequest{list[i].Resources.Requests, list[i].Resources.Limits}
		}
	}
	// As in Kubernetes, the limits do not include the pod overhead, which the pod does not choose.
	own := podresources.PodResourcesOptions{ExcludeOverhead: true}
	var whole *resourceRequest
	if old != nil {
		whole = &resourceRequest{podresources.PodRequests(old, own), podresources.PodLimits(old, own)}
	}
	var errs []error
	for i := range r.Spec.Limits {
		l := &r.Spec.Limits[i]
		switch l.Type {
		case corev1.LimitTypeContainer:
			for _, list := range containersOf(pod) {
				for j := range list {
					errs = append(errs, limitViolations(l,
						resourceRequest{list[j].Resources.Requests, list[j].Resources.Limits}, before[list[j].Name])...)
				}
			}
		case corev1.LimitTypePod:
			errs = append(errs, limitViolations(l,
				resourceRequest{podresources.PodRequests(pod, own), podresources.PodLimits(pod, own)}, whole)...)
		}
	}
	return errs
}

// claimViolations returns the violations of a LimitRange by a claim. old is the stored claim; nil
// if the claim is new.
func claimViolations(c, old *corev1.PersistentVolumeClaim, r *corev1.LimitRange) []error {
	var errs []error
	kept := func(name corev1.ResourceName) bool {
		return old != nil && sameAmount(c.Spec.Resources.Requests, old.Spec.Resources.Requests, name)
	}
	for i := range r.Spec.Limits {
		l := &r.Spec.Limits[i]
		if l.Type != corev1.LimitTypePersistentVolumeClaim {
			continue
		}
		for _, name := range sortedNames(l.Min) {
			if !kept(name) {
				errs = append(errs, atLeast(l, name, c.Spec.Resources.Requests, nil))
			}
		}
		for _, name := range sortedNames(l.Max) {
			if kept(name) {
				continue
			}
			most := l.Max[name]
			switch size, asked := c.Spec.Resources.Requests[name]; {
			case !asked:
				errs = append(errs, fmt.Errorf("maximum %s usage per %s is %s. No request is specified", name, l.Type,
					most.String()))
			case size.Cmp(most) > 0:
				errs = append(errs, fmt.Errorf("maximum %s usage per %s is %s, but request is %s", name, l.Type,
					most.String(), size.String()))
			}
		}
	}
	return slices.DeleteFunc(errs, func(err error) bool { return err == nil })
}

// limitViolations returns the violations of one limit by the resources of a container or pod. old
// contains the previous resources; nil if the container or pod is new.
func limitViolations(l *corev1.LimitRangeItem, current resourceRequest, old *resourceRequest) []error {
	var errs []error
	for _, part := range []struct {
		bounds corev1.ResourceList
		judge  func(l *corev1.LimitRangeItem, name corev1.ResourceName, requests, limits corev1.ResourceList) error
	}{{l.Min, atLeast}, {l.Max, atMost}, {l.MaxLimitRequestRatio, inRatio}} {
		for _, name := range sortedNames(part.bounds) {
			if !current.equalFor(old, name) {
				errs = append(errs, part.judge(l, name, current.requests, current.limits))
			}
		}
	}
	return slices.DeleteFunc(errs, func(err error) bool { return err == nil })
}

func sortedNames(list corev1.ResourceList) []corev1.ResourceName {
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
		return fmt.Errorf("minimum %s usage per %s is %s, but request is %s", name, l.Type, least.String(),
			request.String())
	case limited && limit.Cmp(least) < 0:
		return fmt.Errorf("minimum %s usage per %s is %s, but limit is %s", name, l.Type, least.String(),
			limit.String())
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
		return fmt.Errorf("maximum %s usage per %s is %s, but request is %s", name, l.Type, most.String(),
			request.String())
	}
	return nil
}

func inRatio(l *corev1.LimitRangeItem, name corev1.ResourceName, requests, limits corev1.ResourceList) error {
	most := l.MaxLimitRequestRatio[name]
	request, asked := requests[name]
	limit, limited := limits[name]
	switch {
	case !asked || request.IsZero():
		return fmt.Errorf("%s max limit to request ratio per %s is %s, but no request is specified or request is 0",
			name, l.Type, most.String())
	case !limited || limit.IsZero():
		return fmt.Errorf("%s max limit to request ratio per %s is %s, but no limit is specified or limit is 0", name,
			l.Type, most.String())
	}
	ratio := approximateValue(limit) / approximateValue(request)
	if ratio > approximateValue(most) {
		return fmt.Errorf("%s max limit to request ratio per %s is %s, but provided ratio is %f", name, l.Type,
			most.String(), ratio)
	}
	return nil
}

func approximateValue(q resource.Quantity) float64 { return q.AsApproximateFloat64() }
