// Package kinds is the table of the built-in kinds: for each its names,
// defaulting, validation, printing columns, field selectors and subresources.
// Everything here is a pure function of its arguments; the wording of errors and
// the columns are those of Kubernetes, so that its clients show the same thing.
package kinds

import (
	"fmt"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
	answers "keelson.dev/keelson/controlplane/api/fields"
)

// All returns the table of every built-in kind.
func All(with ...Option) *api.Kinds {
	o := &options{}
	for _, set := range with {
		set(o)
	}
	events := eventKind()
	return api.NewKinds(stored(answered(slices.Concat([]*api.Kind{
		namespaceKind(), nodeKind(), podKind(), serviceKind(), endpointsKind(),
		configMapKind(), secretKind(), serviceAccountKind(), events, newEventKind(events),
		persistentVolumeKind(), persistentVolumeClaimKind(),
		deploymentKind(), replicaSetKind(),
		endpointSliceKind(), leaseKind(),
		ingressKind(), ingressClassKind(), networkPolicyKind(), serviceCIDRKind(), ipAddressKind(), runtimeClassKind(),
		storageClassKind(), csiDriverKind(), csiNodeKind(), volumeAttachmentKind(),
		csiStorageCapacityKind(), volumeAttributesClassKind(),
		validatingWebhookKind(o), mutatingWebhookKind(o), validatingPolicyKind(o), validatingPolicyBindingKind(),
		mutatingPolicyKind(o), mutatingPolicyBindingKind(),
		certificateSigningRequestKind(), clusterTrustBundleKind(),
		flowSchemaKind(), priorityLevelKind(),
		deviceClassKind(o), resourceClaimKind(o), resourceClaimTemplateKind(o), resourceSliceKind(),
		priorityClassKind(), workloadKind(), podGroupKind(), podDisruptionBudgetKind(),
		roleKind(), clusterRoleKind(), roleBindingKind(), clusterRoleBindingKind(), apiServiceKind(),
		customResourceDefinitionKind(),
		tokenReviewKind(), selfSubjectReviewKind(),
		subjectAccessReviewKind(), selfSubjectAccessReviewKind(),
		localSubjectAccessReviewKind(), selfSubjectRulesReviewKind(),
		componentStatusKind(), bindingKind(), nodeMetricsKind(), podMetricsKind(),
	}, workloads())...)...)...)
}

// stored completes the storages of the kinds that are stored as they are: with what was added to a kind after newKind.
func stored(all ...*api.Kind) []*api.Kind {
	for _, k := range all {
		if k.Storage != nil && k.Conversion == nil {
			k.Storage.Hub = api.Version{GVK: k.GVK, New: k.New, Shallow: k.Ops.Shallow, Default: k.Default, Light: k.Storage.Hub.Light}
		}
	}
	return all
}

// answered gives each kind the answers of all its fields, and of those of the bodies of its subresources.
func answered(all ...*api.Kind) []*api.Kind {
	table := answers.Load()
	for _, k := range all {
		k.Answers = table.For(k.New())
		k.Deprecated = deprecation(k)
		k.Warnings, k.CreateWarnings = ObjectWarnings, NewObjectWarnings
		for _, s := range k.Subresources {
			if s.New != nil {
				s.Answers = table.For(s.New())
			}
		}
	}
	return all
}

// KubernetesMinor is the version of Kubernetes, 1.KubernetesMinor, whose kinds these are.
const KubernetesMinor = 37

// deprecation is what Kubernetes warns of who asks for a kind that it means to give up; "" = nothing.
func deprecation(k *api.Kind) string {
	old, ok := k.New().(interface{ APILifecycleDeprecated() (major, minor int) })
	if !ok {
		return ""
	}
	major, minor := old.APILifecycleDeprecated()
	if major > 1 || minor > KubernetesMinor {
		return "" // not yet
	}
	text := fmt.Sprintf("%s %s is deprecated in v%d.%d+", k.GVK.GroupVersion(), k.GVK.Kind, major, minor)
	if r, ok := old.(interface {
		APILifecycleReplacement() schema.GroupVersionKind
	}); ok {
		by := r.APILifecycleReplacement()
		text += fmt.Sprintf("; use %s %s", by.GroupVersion(), by.Kind)
	}
	return text
}

// names are how a kind is spelled.
type names struct {
	gv       schema.GroupVersion
	kind     string
	plural   string
	singular string
	short    []string
	all      bool // member of the category "all"
	// global kinds have no namespace
	global bool
	rule   nameRule // of metadata.name; nil = a DNS subdomain
	// conditional kinds are updated at a stated resourceVersion only
	conditional bool
	// putCreates kinds are created by an update of an object that is not there
	putCreates bool
	// categories are those beside "all"
	categories []string
}

// newKind starts a stored kind of Go types T and L (its list, in which items finds the objects). The caller adds
// what is particular to the kind; name and age are the columns until then. It has a storage of its own, below its resource.
func newKind[T, L any, P api.PtrTo[T], PL api.ListOf[L]](n names, items func(*L) *[]T) *api.Kind {
	k := &api.Kind{
		GVK:        n.gv.WithKind(n.kind),
		Resource:   n.plural,
		Singular:   n.singular,
		ShortNames: n.short,
		Categories: n.categories,
		Namespaced: !n.global,
		New:        func() api.Object { return P(new(T)) },
		NewList:    func() runtime.Object { return PL(new(L)) },
		Ops:        api.OpsOf[T, L, P, PL](items),
		Typed:      true,

		Conditional:     n.conditional,
		CreatesByUpdate: n.putCreates,

		Storage: &api.Storage{Prefix: api.StorageRoot + n.plural + "/", Namespaced: !n.global},
		Columns: columns(nameCol, ageCol),
		Row: func(o api.Object, now time.Time) []any {
			return []any{o.GetName(), age(o, now)}
		},
	}
	if n.all {
		k.Categories = append([]string{"all"}, n.categories...)
	}
	checkMeta(k, n.rule)
	return k
}

// newVirtual starts a kind that is answered, not stored.
func newVirtual[T any, P api.PtrTo[T]](n names) *api.Kind {
	return &api.Kind{
		GVK:        n.gv.WithKind(n.kind),
		Resource:   n.plural,
		Singular:   n.singular,
		Virtual:    true,
		Typed:      true,
		Namespaced: !n.global,
		Verbs:      []string{"create"},
		New:        func() api.Object { return P(new(T)) },
	}
}

// defaults, row and fieldsOf let the functions of a kind take its own type.

func defaults[P api.Object](f func(P)) func(api.Object) {
	return func(o api.Object) { f(o.(P)) }
}

func row[P api.Object](f func(obj P, now time.Time) []any) func(api.Object, time.Time) []any {
	return func(o api.Object, now time.Time) []any { return f(o.(P), now) }
}

func fieldsOf[P api.Object](f func(P) fields.Set) func(api.Object) fields.Set {
	return func(o api.Object) fields.Set { return f(o.(P)) }
}
