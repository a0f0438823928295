// Package podsecurity implements Pod Security admission by the labels of namespaces. A label
// defines the Pod Security Standard that pods must meet (enforce). Other labels define the
// standards with violations that are added to the audit event (audit) or reported to the client as
// warnings (warn). Each can select a version of the standards, which
// k8s.io/pod-security-admission/policy implements.
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

// Cluster reads the objects on which the plugin depends.
type Cluster interface {
	// Get returns a shared object; ok is false when it does not exist.
	Get(ctx context.Context, resource, namespace, name string) (o api.Object, ok bool)
	// List returns the shared objects of a namespace, from the store if fresh is set and otherwise
	// from this replica's cache.
	List(ctx context.Context, resource, namespace string, fresh bool) ([]api.Object, error)
}

// Plugin checks pods, workloads that create pods, and the labels of namespaces.
type Plugin struct {
	cluster   Cluster
	config    Config
	evaluator policy.Evaluator
}

// New returns a plugin with the defaults and exemptions of config, which must be valid.
func New(cluster Cluster, config Config) *Plugin {
	evaluator, err := policy.NewEvaluator(policy.DefaultChecks(), nil)
	if err != nil {
		panic(fmt.Sprintf("podsecurity: the standards contradict themselves: %v", err)) // cannot happen: the checks are constants of a library
	}
	return &Plugin{cluster: cluster, config: config, evaluator: evaluator}
}

// Admit is a validating admission plugin. It rejects pods that violate the enforced level, and
// namespaces with invalid labels.
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

// template returns the pod template of a workload; nil for other kinds.
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

// significant reports whether an update of a pod changes fields that the standards check. Only
// images and ephemeral containers are mutable. Comparing whole containers is cheap and remains
// correct if more fields become mutable.
func significant(now, was *corev1.PodSpec) bool {
	return !reflect.DeepEqual(now.Containers, was.Containers) ||
		!reflect.DeepEqual(now.InitContainers, was.InitContainers) ||
		!reflect.DeepEqual(now.EphemeralContainers, was.EphemeralContainers) ||
		!reflect.DeepEqual(now.SecurityContext, was.SecurityContext)
}

// pod rejects a pod that violates the enforced level. It records violations of the audit level and
// warns the client of violations of the warn level.
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

// workload records and warns of violations by a pod template. It does not reject them; pods of the
// template are rejected at creation.
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

// policyOf returns the policy in a namespace's labels. A namespace that does not exist has no
// labels; another plugin rejects requests for it.
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

// exempt reports whether the request is exempt, and records the reason in the audit event.
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
