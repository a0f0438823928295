package podsecurity

import (
	"context"
	"fmt"
	"reflect"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"
	psa "k8s.io/pod-security-admission/api"

	"keelson.dev/keelson/controlplane/api"
)

// Limits of the check of existing pods after a change of a namespace's labels: number of pods, and
// duration.
const (
	maxPodsChecked    = 3000
	evaluationTimeout = time.Second
)

// checkNamespace rejects invalid Pod Security labels. If an update enforces a stricter policy, it
// warns of existing pods that violate it.
func (p *Plugin) checkNamespace(ctx context.Context, r *api.Request, ns, old *corev1.Namespace) error {
	now, errs := psa.PolicyToEvaluate(ns.Labels, p.config.Defaults)
	if old == nil {
		if len(errs) > 0 {
			return newInvalid(r, ns, errs)
		}
		p.warnExempt(ctx, ns, now)
		return nil
	}
	before, oldErrs := psa.PolicyToEvaluate(old.Labels, p.config.Defaults)
	if len(errs) > 0 && !reflect.DeepEqual(errs, oldErrs) {
		return newInvalid(r, ns, errs)
	}
	relaxed := now.Enforce.Version == before.Enforce.Version &&
		psa.CompareLevels(now.Enforce.Level, before.Enforce.Level) < 1
	if now.Enforce.Level == psa.LevelPrivileged || relaxed {
		return nil
	}
	if slices.Contains(p.config.Namespaces, ns.Name) {
		p.warnExempt(ctx, ns, now)
		return nil
	}
	for _, w := range p.namespaceViolations(ctx, ns.Name, now.Enforce) {
		api.Warn(ctx, w)
	}
	return nil
}

func newInvalid(r *api.Request, ns *corev1.Namespace, errs field.ErrorList) error {
	return apierrors.NewInvalid(r.Kind.GVK.GroupKind(), ns.Name, errs)
}

// warnExempt warns the client that Pod Security labels have no effect in an exempt namespace.
func (p *Plugin) warnExempt(ctx context.Context, ns *corev1.Namespace, level psa.Policy) {
	if !slices.Contains(p.config.Namespaces, ns.Name) || level.FullyPrivileged() ||
		level.Equivalent(&p.config.Defaults) {
		return
	}
	api.Warn(ctx, fmt.Sprintf("namespace %q is exempt from Pod Security, and the policy (%s) will be ignored", ns.Name,
		describeLabels(ns.Labels, level)))
}

// describeLabels returns the part of a policy that labels set: "enforce=baseline:latest,
// warn=restricted:v1.30".
func describeLabels(labels map[string]string, level psa.Policy) string {
	out := ""
	for _, m := range []struct {
		name, level, version string
		lv                   psa.LevelVersion
	}{
		{"enforce", psa.EnforceLevelLabel, psa.EnforceVersionLabel, level.Enforce},
		{"audit", psa.AuditLevelLabel, psa.AuditVersionLabel, level.Audit},
		{"warn", psa.WarnLevelLabel, psa.WarnVersionLabel, level.Warn},
	} {
		_, level := labels[m.level]
		_, version := labels[m.version]
		if m.lv.Level == psa.LevelPrivileged || !level && !version {
			continue
		}
		if out != "" {
			out += ", "
		}
		out += m.name + "=" + m.lv.String()
	}
	return out
}

// violationCount counts the pods that violate a level for the same reason. first is the name of the
// first of them.
type violationCount struct {
	reason, first string
	count         int
}

// namespaceViolations returns warnings about the pods of a namespace that violate a level. Because
// the check is limited, it checks one pod of each controller first.
func (p *Plugin) namespaceViolations(ctx context.Context, namespace string, enforce psa.LevelVersion) []string {
	ctx, cancel := context.WithTimeout(ctx, evaluationTimeout)
	defer cancel()
	all, err := p.cluster.List(ctx, "pods", namespace, false)
	if err != nil {
		return []string{"failed to list pods while checking new PodSecurity enforce level"}
	}
	pods := p.inOrder(all)
	total := len(pods)
	pods = pods[:min(total, maxPodsChecked)]
	var found []violationCount
	looked := 0
	for _, pod := range pods {
		if ctx.Err() != nil {
			break
		}
		looked++
		if got := p.evaluateLevel(enforce, &pod.ObjectMeta, &pod.Spec); !got.Allowed {
			found = countViolation(found, got.ForbiddenReason(), pod.Name)
		}
	}
	var out []string
	if looked < total {
		out = append(out,
			fmt.Sprintf("new PodSecurity enforce level only checked against the first %d of %d existing pods",
				looked, total))
	}
	if len(found) > 0 {
		out = append(out, fmt.Sprintf("existing pods in namespace %q violate the new PodSecurity enforce level %q",
			namespace, enforce))
	}
	lines := make([]string, 0, len(found))
	for _, s := range found {
		lines = append(lines, s.String())
	}
	slices.Sort(lines)
	return append(out, lines...)
}

func countViolation(violations []violationCount, reason, pod string) []violationCount {
	for i := range violations {
		if violations[i].reason == reason {
			violations[i].first = min(violations[i].first, pod)
			violations[i].count++
			return violations
		}
	}
	return append(violations, violationCount{reason, pod, 1})
}

func (s violationCount) String() string {
	switch s.count {
	case 1:
		return fmt.Sprintf("%s: %s", s.first, s.reason)
	case 2:
		return fmt.Sprintf("%s (and 1 other pod): %s", s.first, s.reason)
	}
	return fmt.Sprintf("%s (and %d other pods): %s", s.first, s.count-1, s.reason)
}

// inOrder returns the pods to check. One pod of each controller comes first, so that each kind of
// pod is checked before the time limit. Pods with an exempt RuntimeClass are left out.
func (p *Plugin) inOrder(objects []api.Object) []*corev1.Pod {
	var first, rest []*corev1.Pod
	seen := map[types.UID]bool{}
	for _, o := range objects {
		pod := o.(*corev1.Pod)
		if c := pod.Spec.RuntimeClassName; c != nil && slices.Contains(p.config.RuntimeClasses, *c) {
			continue
		}
		owner := metav1.GetControllerOfNoCopy(pod)
		if owner != nil && seen[owner.UID] {
			rest = append(rest, pod)
			continue
		}
		if owner != nil {
			seen[owner.UID] = true
		}
		first = append(first, pod)
	}
	return append(first, rest...)
}
