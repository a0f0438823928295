// Package podsecurity is Pod Security admission: a namespace's labels say which
// of the Pod Security Standards its pods must meet (enforce), which violations
// the audit notes (audit) and of which the client is warned (warn), each at the
// version it names. The standards themselves are those of
// k8s.io/pod-security-admission/policy.
package podsecurity

import (
	"context"
	"fmt"
	"reflect"
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	psa "k8s.io/pod-security-admission/api"
	"k8s.io/pod-security-admission/policy"

	"keelson.dev/keelson/controlplane/api"
)

// Cluster is what the plugin looks at besides the object.
type Cluster interface {
	// Get returns a shared object; ok is false when none exists.
	Get(ctx context.Context, resource, namespace, name string) (o api.Object, ok bool)
	// List returns the shared objects of a namespace: those of now when fresh, else those of this replica's cache.
	List(ctx context.Context, resource, namespace string, fresh bool) ([]api.Object, error)
}

// Plugin judges pods, workloads that make pods, and the labels of namespaces.
type Plugin struct {
	cluster   Cluster
	config    Config
	evaluator policy.Evaluator
}

// New returns a plugin with the defaults and exemptions of config, which has been checked.
func New(cluster Cluster, config Config) *Plugin {
	evaluator, err := policy.NewEvaluator(policy.DefaultChecks(), nil)
	if err != nil {
		panic(fmt.Sprintf("podsecurity: the standards contradict themselves: %v", err)) // they are constants of a library
	}
	return &Plugin{cluster: cluster, config: config, evaluator: evaluator}
}

// Admit is a validating admission plugin.
func (p *Plugin) Admit(ctx context.Context, a *api.Attempt) error {
	if a.Whole == nil {
		return nil
	}
	r := a.Request
	switch o := a.Whole.(type) {
	case *corev1.Namespace:
		if a.Facet == "" {
			before, _ := a.Stored.(*corev1.Namespace)
			return p.namespace(ctx, r, o, before)
		}
	case *corev1.Pod:
		before, _ := a.Stored.(*corev1.Pod)
		if a.Facet != "status" && a.Facet != "binding" && (before == nil || significant(&o.Spec, &before.Spec)) {
			return p.pod(ctx, r, o)
		}
	default:
		if t := template(o); t != nil && a.Facet == "" {
			p.workload(ctx, r, t)
		}
	}
	return nil
}

// template is what a workload makes its pods of; nil for other kinds.
func template(obj api.Object) *corev1.PodTemplateSpec {
	switch o := obj.(type) {
	case *corev1.PodTemplate:
		return &o.Template
	case *corev1.ReplicationController:
		return o.Spec.Template
	case *appsv1.ReplicaSet:
		return &o.Spec.Template
	case *appsv1.Deployment:
		return &o.Spec.Template
	case *appsv1.DaemonSet:
		return &o.Spec.Template
	case *appsv1.StatefulSet:
		return &o.Spec.Template
	case *batchv1.Job:
		return &o.Spec.Template
	case *batchv1.CronJob:
		return &o.Spec.JobTemplate.Spec.Template
	}
	return nil
}

// significant says whether an update of a pod changes what is judged. Of that only images and ephemeral
// containers can change; looking at whole containers costs little and stays true should more become mutable.
func significant(now, was *corev1.PodSpec) bool {
	return !reflect.DeepEqual(now.Containers, was.Containers) ||
		!reflect.DeepEqual(now.InitContainers, was.InitContainers) ||
		!reflect.DeepEqual(now.EphemeralContainers, was.EphemeralContainers) ||
		!reflect.DeepEqual(now.SecurityContext, was.SecurityContext)
}

// pod refuses what violates the enforced level, notes and warns of the rest.
func (p *Plugin) pod(ctx context.Context, r *api.Request, pod *corev1.Pod) error {
	if p.exempt(ctx, r, &pod.Spec) {
		return nil
	}
	want, errs := p.policyOf(ctx, r.Namespace)
	if len(errs) == 0 && want.FullyPrivileged() {
		annotate(ctx, psa.EnforcedPolicyAnnotationKey, want.Enforce.String())
		return nil
	}
	if len(errs) > 0 {
		annotate(ctx, "error", fmt.Sprintf("Failed to parse policy: %v", errs.ToAggregate()))
	}
	annotate(ctx, psa.EnforcedPolicyAnnotationKey, want.Enforce.String())
	enforced := p.judge(want.Enforce, &pod.ObjectMeta, &pod.Spec)
	p.note(ctx, want.Audit, &pod.ObjectMeta, &pod.Spec)
	if !enforced.Allowed {
		name := pod.Name
		if name == "" {
			name = pod.GenerateName
		}
		return apierrors.NewForbidden(r.Kind.GroupResource(), name,
			fmt.Errorf("violates PodSecurity %q: %s", want.Enforce, enforced.ForbiddenDetail()))
	}
	p.warn(ctx, want.Warn, &pod.ObjectMeta, &pod.Spec)
	return nil
}

// workload notes and warns: what a template violates is refused when a pod is made of it.
func (p *Plugin) workload(ctx context.Context, r *api.Request, t *corev1.PodTemplateSpec) {
	if p.exempt(ctx, r, &t.Spec) {
		return
	}
	want, errs := p.policyOf(ctx, r.Namespace)
	if len(errs) > 0 {
		annotate(ctx, "error", fmt.Sprintf("Failed to parse policy: %v", errs.ToAggregate()))
	}
	p.note(ctx, want.Audit, &t.ObjectMeta, &t.Spec)
	p.warn(ctx, want.Warn, &t.ObjectMeta, &t.Spec)
}

// policyOf reads a namespace's labels. A namespace that is not known has no labels: its
// lifecycle is another plugin's care.
func (p *Plugin) policyOf(ctx context.Context, namespace string) (psa.Policy, field.ErrorList) {
	var labels map[string]string
	if o, ok := p.cluster.Get(ctx, "namespaces", "", namespace); ok {
		labels = o.GetLabels()
	}
	return psa.PolicyToEvaluate(labels, p.config.Defaults)
}

func (p *Plugin) judge(lv psa.LevelVersion, meta *metav1.ObjectMeta, spec *corev1.PodSpec) policy.AggregateCheckResult {
	return policy.AggregateCheckResults(p.evaluator.EvaluatePod(lv, meta, spec))
}

func (p *Plugin) note(ctx context.Context, lv psa.LevelVersion, meta *metav1.ObjectMeta, spec *corev1.PodSpec) {
	if got := p.judge(lv, meta, spec); !got.Allowed {
		annotate(ctx, psa.AuditViolationsAnnotationKey,
			fmt.Sprintf("would violate PodSecurity %q: %s", lv, got.ForbiddenDetail()))
	}
}

func (p *Plugin) warn(ctx context.Context, lv psa.LevelVersion, meta *metav1.ObjectMeta, spec *corev1.PodSpec) {
	if got := p.judge(lv, meta, spec); !got.Allowed {
		api.Warn(ctx, fmt.Sprintf("would violate PodSecurity %q: %s", lv, got.ForbiddenDetail()))
	}
}

// exempt says whether nobody judges the request, and notes why.
func (p *Plugin) exempt(ctx context.Context, r *api.Request, spec *corev1.PodSpec) bool {
	why := ""
	switch {
	case slices.Contains(p.config.Namespaces, r.Namespace):
		why = "namespace"
	case slices.Contains(p.config.Usernames, r.User.Name):
		why = "user"
	case spec.RuntimeClassName != nil && slices.Contains(p.config.RuntimeClasses, *spec.RuntimeClassName):
		why = "runtimeClass"
	default:
		return false
	}
	annotate(ctx, psa.ExemptionReasonAnnotationKey, why)
	return true
}

func annotate(ctx context.Context, key, value string) {
	api.Annotate(ctx, psa.AuditAnnotationPrefix+key, value)
}
