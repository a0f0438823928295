// Package podsecurity implements Pod Security admission by the labels of namespaces. The label
// enforce defines the Pod Security Standard that pods must meet. Violations of the standard in the
// label audit are added to the audit event. The client is warned of violations of the standard in
// the label warn. Each label can select a version of the standards, which
// k8s.io/pod-security-admission/policy implements.
package podsecurity

import (
	"context"
	"fmt"
	"reflect"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	psa "k8s.io/pod-security-admission/api"
	"k8s.io/pod-security-admission/policy"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/core/podspec"
)

// Cluster reads the objects on which the plugin depends.
type Cluster interface {
	// Get returns an object, which the caller must not change. ok is false if the object does not
	// exist.
	Get(ctx context.Context, resource, namespace, name string) (o api.Object, ok bool)
	// List returns the objects of a namespace, which the caller must not change. It reads the store
	// if fresh is true, and otherwise this replica's cache.
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
		// cannot happen: the checks are constants of a library
		panic(fmt.Sprintf("podsecurity: creating the evaluator: %v", err))
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
			return p.checkNamespace(ctx, r, o, before)
		}
	case *corev1.Pod:
		before, _ := a.Stored.(*corev1.Pod)
		if a.Facet != "status" && a.Facet != "binding" &&
			(before == nil || changesCheckedFields(&o.Spec, &before.Spec)) {
			return p.checkPod(ctx, r, o)
		}
	default:
		if t, _ := podspec.PodTemplateOf(o); t != nil && a.Facet == "" {
			p.checkWorkload(ctx, r, t)
		}
	}
	return nil
}

// changesCheckedFields reports whether an update of a pod changes fields that the standards check.
// Only images and ephemeral containers are mutable. Comparing whole containers is cheap and remains
// correct if more fields become mutable.
func changesCheckedFields(spec, old *corev1.PodSpec) bool {
	return !reflect.DeepEqual(spec.Containers, old.Containers) ||
		!reflect.DeepEqual(spec.InitContainers, old.InitContainers) ||
		!reflect.DeepEqual(spec.EphemeralContainers, old.EphemeralContainers) ||
		!reflect.DeepEqual(spec.SecurityContext, old.SecurityContext)
}

// checkPod rejects a pod that violates the enforced level. It records violations of the audit level
// and warns the client of violations of the warn level.
func (p *Plugin) checkPod(ctx context.Context, r *api.Request, pod *corev1.Pod) error {
	if p.isExempt(ctx, r, &pod.Spec) {
		return nil
	}
	want, errs := p.policyOf(ctx, r.Namespace)
	if len(errs) == 0 && want.FullyPrivileged() {
		addAnnotation(ctx, psa.EnforcedPolicyAnnotationKey, want.Enforce.String())
		return nil
	}
	if len(errs) > 0 {
		addAnnotation(ctx, "error", fmt.Sprintf("Failed to parse policy: %v", errs.ToAggregate()))
	}
	addAnnotation(ctx, psa.EnforcedPolicyAnnotationKey, want.Enforce.String())
	enforced := p.evaluateLevel(want.Enforce, &pod.ObjectMeta, &pod.Spec)
	p.auditViolations(ctx, want.Audit, &pod.ObjectMeta, &pod.Spec)
	if !enforced.Allowed {
		name := pod.Name
		if name == "" {
			name = pod.GenerateName
		}
		return apierrors.NewForbidden(r.Kind.GroupResource(), name,
			fmt.Errorf("violates PodSecurity %q: %s", want.Enforce, enforced.ForbiddenDetail()))
	}
	p.warnViolations(ctx, want.Warn, &pod.ObjectMeta, &pod.Spec)
	return nil
}

// checkWorkload records violations by a pod template in the audit event, and warns the client of
// them. It does not reject them; the pods of the template are rejected when they are created.
func (p *Plugin) checkWorkload(ctx context.Context, r *api.Request, t *corev1.PodTemplateSpec) {
	if p.isExempt(ctx, r, &t.Spec) {
		return
	}
	want, errs := p.policyOf(ctx, r.Namespace)
	if len(errs) > 0 {
		addAnnotation(ctx, "error", fmt.Sprintf("Failed to parse policy: %v", errs.ToAggregate()))
	}
	p.auditViolations(ctx, want.Audit, &t.ObjectMeta, &t.Spec)
	p.warnViolations(ctx, want.Warn, &t.ObjectMeta, &t.Spec)
}

// policyOf returns the policy that the labels of a namespace define. A namespace that does not
// exist has no labels; another plugin rejects requests in it.
func (p *Plugin) policyOf(ctx context.Context, namespace string) (psa.Policy, field.ErrorList) {
	var labels map[string]string
	if o, ok := p.cluster.Get(ctx, "namespaces", "", namespace); ok {
		labels = o.GetLabels()
	}
	return psa.PolicyToEvaluate(labels, p.config.Defaults)
}

func (p *Plugin) evaluateLevel(
	lv psa.LevelVersion, meta *metav1.ObjectMeta, spec *corev1.PodSpec,
) policy.AggregateCheckResult {
	return policy.AggregateCheckResults(p.evaluator.EvaluatePod(lv, meta, spec))
}

func (p *Plugin) auditViolations(
	ctx context.Context, lv psa.LevelVersion, meta *metav1.ObjectMeta, spec *corev1.PodSpec,
) {
	if got := p.evaluateLevel(lv, meta, spec); !got.Allowed {
		addAnnotation(ctx, psa.AuditViolationsAnnotationKey,
			fmt.Sprintf("would violate PodSecurity %q: %s", lv, got.ForbiddenDetail()))
	}
}

func (p *Plugin) warnViolations(
	ctx context.Context, lv psa.LevelVersion, meta *metav1.ObjectMeta, spec *corev1.PodSpec,
) {
	if got := p.evaluateLevel(lv, meta, spec); !got.Allowed {
		api.Warn(ctx, fmt.Sprintf("would violate PodSecurity %q: %s", lv, got.ForbiddenDetail()))
	}
}

// isExempt reports whether a request is exempt from Pod Security, and records the reason in the
// audit event.
func (p *Plugin) isExempt(ctx context.Context, r *api.Request, spec *corev1.PodSpec) bool {
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
	addAnnotation(ctx, psa.ExemptionReasonAnnotationKey, why)
	return true
}

func addAnnotation(ctx context.Context, key, value string) {
	api.Annotate(ctx, psa.AuditAnnotationPrefix+key, value)
}
