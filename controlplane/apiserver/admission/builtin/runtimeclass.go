package builtin

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	"k8s.io/apimachinery/pkg/api/equality"

	"keelson.dev/keelson/controlplane/apiserver/admission"
)

// runtimeClass returns a plugin that adds the overhead, node selector and tolerations of a new
// pod's RuntimeClass. If a later mutating plugin sets another class, the second round of mutating
// plugins adds that class's values too; the first class's values remain.
func runtimeClass(c admission.Cluster) func(ctx context.Context, a *admission.Attempt) error {
	return func(ctx context.Context, a *admission.Attempt) error {
		pod, class, err := classOfRuntime(ctx, c, a)
		if err != nil || class == nil {
			return err
		}
		if class.Overhead != nil {
			if len(pod.Spec.Overhead) > 0 && !equality.Semantic.DeepEqual(class.Overhead.PodFixed, pod.Spec.Overhead) {
				return admission.NewForbidden(a, pod, errOtherOverhead)
			}
			pod.Spec.Overhead = class.Overhead.PodFixed.DeepCopy() // a copy, since the class is shared
		}
		if class.Scheduling == nil {
			return nil
		}
		for _, key := range slices.Sorted(maps.Keys(class.Scheduling.NodeSelector)) {
			want := class.Scheduling.NodeSelector[key]
			if have, ok := pod.Spec.NodeSelector[key]; ok && have != want {
				return admission.NewForbidden(a, pod, fmt.Errorf(
					"conflict: runtimeClass.scheduling.nodeSelector[%s] = %s; pod.spec.nodeSelector[%s] = %s", key,
					want, key, have))
			}
			if pod.Spec.NodeSelector == nil {
				pod.Spec.NodeSelector = map[string]string{}
			}
			pod.Spec.NodeSelector[key] = want
		}
		if more := class.Scheduling.Tolerations; len(more) > 0 {
			pod.Spec.Tolerations = mergeTolerations(pod.Spec.Tolerations,
				(&nodev1.Scheduling{Tolerations: more}).DeepCopy().Tolerations)
		}
		return nil
	}
}

// runtimeOverhead returns a plugin that rejects pods with an overhead different from that of their
// RuntimeClass.
func runtimeOverhead(c admission.Cluster) func(ctx context.Context, a *admission.Attempt) error {
	return func(ctx context.Context, a *admission.Attempt) error {
		pod, class, err := classOfRuntime(ctx, c, a)
		switch {
		case err != nil || pod == nil || len(pod.Spec.Overhead) == 0:
			return err
		case class == nil || class.Overhead == nil:
			return admission.NewForbidden(a, pod,
				errors.New("pod rejected: Pod Overhead set without corresponding RuntimeClass defined Overhead"))
		case !equality.Semantic.DeepEqual(class.Overhead.PodFixed, pod.Spec.Overhead):
			return admission.NewForbidden(a, pod, errOtherOverhead)
		}
		return nil
	}
}

var errOtherOverhead = errors.New("pod rejected: Pod's Overhead doesn't match RuntimeClass's defined Overhead")

// classOfRuntime returns the pod that an attempt creates and the pod's RuntimeClass. class is nil
// if the pod uses the default runtime (no class or ""). pod is nil if the attempt creates no pod.
func classOfRuntime(ctx context.Context, c admission.Cluster, a *admission.Attempt) (
	pod *corev1.Pod, class *nodev1.RuntimeClass, err error,
) {
	if !a.IsCoreResource("pods") || !a.CreatesObject() {
		return nil, nil, nil
	}
	pod = a.Whole.(*corev1.Pod)
	name := pod.Spec.RuntimeClassName
	if name == nil || *name == "" {
		return pod, nil, nil
	}
	o, ok := c.Get(ctx, "runtimeclasses", "", *name)
	if !ok {
		return nil, nil, admission.NewForbidden(a, pod, fmt.Errorf("pod rejected: RuntimeClass %q not found", *name))
	}
	return pod, o.(*nodev1.RuntimeClass), nil
}
