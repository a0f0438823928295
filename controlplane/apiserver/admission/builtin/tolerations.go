package builtin

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"

	"keelson.dev/keelson/controlplane/api/kinds/core/podspec"
	"keelson.dev/keelson/controlplane/api/quota"
	"keelson.dev/keelson/controlplane/apiserver/admission"
)

// mergeTolerations returns the tolerations of both lists without duplicates. It omits a toleration
// if another toleration of the result tolerates at least the same taints.
func mergeTolerations(base, additional []corev1.Toleration) []corev1.Toleration {
	all := slices.Concat(base, additional)
	var out []corev1.Toleration
	for i := range all {
		covered := false
		for j := range all {
			if i != j && toleratesAll(&all[j], &all[i]) && (i > j || !toleratesAll(&all[i], &all[j])) {
				covered = true
			}
		}
		if !covered {
			out = append(out, all[i])
		}
	}
	return out
}

// toleratesAll reports whether a tolerates every taint that b tolerates.
func toleratesAll(a, b *corev1.Toleration) bool {
	if equality.Semantic.DeepEqual(a, b) {
		return true
	}
	if a.Key != b.Key && (a.Key != "" || a.Operator != corev1.TolerationOpExists) ||
		a.Effect != "" && a.Effect != b.Effect {
		return false
	}
	if a.Effect == corev1.TaintEffectNoExecute && a.TolerationSeconds != nil {
		if b.TolerationSeconds == nil || *a.TolerationSeconds < *b.TolerationSeconds {
			return false
		}
	}
	operator := func(t *corev1.Toleration) corev1.TolerationOperator {
		return cmp.Or(t.Operator, corev1.TolerationOpEqual)
	}
	switch operator(a) {
	case corev1.TolerationOpExists:
		return true
	case corev1.TolerationOpEqual:
		return operator(b) == corev1.TolerationOpEqual && a.Value == b.Value
	}
	return false // numeric operators are not compared
}

// Annotations of a namespace with the default tolerations and the allowed tolerations of its pods.
const (
	namespaceTolerations = "scheduler.alpha.kubernetes.io/defaultTolerations"
	namespaceAllowed     = "scheduler.alpha.kubernetes.io/tolerationsWhitelist"
)

// podTolerations returns a plugin that adds the default tolerations of the namespace to new pods.
// Pods with a QoS class other than BestEffort also get a toleration for memory pressure.
func podTolerations(c admission.Cluster) func(ctx context.Context, a *admission.Attempt) error {
	return func(ctx context.Context, a *admission.Attempt) error {
		pod, ok := a.Whole.(*corev1.Pod)
		if !ok || !a.CreatesObject() && !a.UpdatesObject() {
			return nil
		}
		if a.CreatesObject() {
			more, err := tolerationsOf(ctx, c, a, namespaceTolerations)
			if err != nil {
				return err
			}
			if len(more) > 0 {
				pod.Spec.Tolerations = mergeTolerations(pod.Spec.Tolerations, more)
			}
		}
		if podspec.QOSClass(&pod.Spec) != corev1.PodQOSBestEffort {
			pod.Spec.Tolerations = mergeTolerations(pod.Spec.Tolerations, []corev1.Toleration{{
				Key: corev1.TaintNodeMemoryPressure, Operator: corev1.TolerationOpExists,
				Effect: corev1.TaintEffectNoSchedule}})
		}
		return nil
	}
}

// allowedTolerations returns a plugin that rejects pods with tolerations that the namespace does
// not allow.
func allowedTolerations(c admission.Cluster) func(ctx context.Context, a *admission.Attempt) error {
	return func(ctx context.Context, a *admission.Attempt) error {
		pod, ok := a.Whole.(*corev1.Pod)
		if !ok || !a.CreatesObject() && !a.UpdatesObject() || len(pod.Spec.Tolerations) == 0 {
			return nil
		}
		allowed, err := tolerationsOf(ctx, c, a, namespaceAllowed)
		if err != nil || len(allowed) == 0 {
			return err
		}
		for i := range pod.Spec.Tolerations {
			if !slices.ContainsFunc(allowed, func(t corev1.Toleration) bool {
				return toleratesAll(&t, &pod.Spec.Tolerations[i])
			}) {
				return admission.NewForbidden(a, pod, errors.New(
					"pod tolerations (possibly merged with namespace default tolerations) conflict with its "+
						"namespace whitelist"))
			}
		}
		return nil
	}
}

// tolerationsOf returns the tolerations in an annotation of the attempt's namespace.
func tolerationsOf(ctx context.Context, c admission.Cluster, a *admission.Attempt, annotation string) (
	[]corev1.Toleration, error,
) {
	ns, ok := c.Get(ctx, "namespaces", "", a.Namespace)
	if !ok {
		return nil, admission.NewNotFound("namespaces", a.Namespace)
	}
	text := ns.GetAnnotations()[annotation]
	if text == "" {
		return nil, nil
	}
	var out []corev1.Toleration
	if err := json.Unmarshal([]byte(text), &out); err != nil {
		return nil, admission.NewForbidden(a, a.Whole,
			fmt.Errorf("annotation %s of namespace %s is not a list of tolerations: %w", annotation, a.Namespace, err))
	}
	return out, nil
}

// extendedResourceToleration adds a toleration for each extended resource that a pod requests.
// Nodes reserved for such a resource have a taint with its name.
func extendedResourceToleration(_ context.Context, a *admission.Attempt) error {
	pod, ok := a.Whole.(*corev1.Pod)
	if !ok || !a.CreatesObject() && !a.UpdatesObject() {
		return nil
	}
	asked := map[string]bool{}
	for _, list := range [][]corev1.Container{pod.Spec.Containers, pod.Spec.InitContainers} {
		for i := range list {
			for name := range list[i].Resources.Requests {
				if quota.IsExtended(name) {
					asked[string(name)] = true
				}
			}
		}
	}
	for _, name := range sortedKeys(asked) {
		t := corev1.Toleration{Key: name, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule}
		if !slices.ContainsFunc(pod.Spec.Tolerations, func(have corev1.Toleration) bool {
			return equality.Semantic.DeepEqual(have, t)
		}) {
			pod.Spec.Tolerations = append(pod.Spec.Tolerations, t)
		}
	}
	return nil
}

func sortedKeys(m map[string]bool) []string {
	out := make([]string, 0, len(m))
	for k := range m {
		out = append(out, k)
	}
	slices.Sort(out)
	return out
}
