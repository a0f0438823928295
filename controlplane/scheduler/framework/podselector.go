package framework

import (
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
)

// PodSelector selects pods by a label selector in some namespaces, for an affinity term, a topology
// spread constraint or a Service. It is immutable.
type PodSelector struct {
	// ID is a text that is equal for all PodSelectors with the same namespaces and selectors.
	ID string

	namespaces         []string        // names of the selected namespaces, sorted
	nsSelector         labels.Selector // namespaces with matching labels are selected too; nil = none
	selector           labels.Selector
	excludeTerminating bool     // terminating pods are not selected
	buckets            []bucket // a podSelectorIndex stores an item with this selector in one of these
}

// bucket is a key of podSelectorIndex for selectors that have two properties in common: the only
// namespace that they select ("" = they may select several), and one label that they require (key
// "" = none).
type bucket struct{ namespace, key, value string }

// NewPodSelector returns the PodSelector of an affinity term with the given namespaces, namespace
// selector and label selector. If the term has neither namespaces nor a namespace selector, it
// selects pods in podNamespace, the namespace of the pod with the term.
func NewPodSelector(podNamespace string, namespaces []string, nsSelector, selector *metav1.LabelSelector) *PodSelector {
	p := &PodSelector{selector: asSelector(selector)}
	if nsSelector != nil {
		p.nsSelector = asSelector(nsSelector)
	} else if len(namespaces) == 0 {
		namespaces = []string{podNamespace}
	}
	p.namespaces = slices.Compact(slices.Sorted(slices.Values(namespaces)))
	return p.initialize()
}

// NewNamespacePodSelector returns a PodSelector that selects the pods in one namespace which match
// the label selector and are not terminating.
func NewNamespacePodSelector(namespace string, selector labels.Selector) *PodSelector {
	p := &PodSelector{namespaces: []string{namespace}, selector: selector, excludeTerminating: true}
	return p.initialize()
}

// asSelector converts a LabelSelector of the API. For nil or an invalid LabelSelector it returns a
// selector that matches nothing.
func asSelector(s *metav1.LabelSelector) labels.Selector {
	sel, err := metav1.LabelSelectorAsSelector(s)
	if err != nil {
		return labels.Nothing()
	}
	return sel
}

func (p *PodSelector) initialize() *PodSelector {
	var id strings.Builder
	for _, ns := range p.namespaces {
		id.WriteString(ns)
		id.WriteByte(',')
	}
	id.WriteByte(0)
	if p.nsSelector != nil {
		id.WriteString(selectorString(p.nsSelector))
	} else {
		id.WriteByte(1)
	}
	id.WriteByte(0)
	id.WriteString(selectorString(p.selector))
	if p.excludeTerminating {
		id.WriteByte(2)
	}
	p.ID = id.String()
	namespace := ""
	if len(p.namespaces) == 1 && p.nsSelector == nil {
		namespace = p.namespaces[0]
	}
	requirements, _ := p.selector.Requirements()
	for _, r := range requirements {
		if op := r.Operator(); op == selection.In || op == selection.Equals || op == selection.DoubleEquals {
			if values := r.ValuesUnsorted(); len(values) == 1 {
				p.buckets = append(p.buckets, bucket{namespace, r.Key(), values[0]})
			}
		}
	}
	if len(p.buckets) == 0 {
		p.buckets = []bucket{{namespace: namespace}}
	}
	return p
}

// selectorString returns a text that is equal only for equal selectors. Unlike s.String, it returns
// different texts for labels.Nothing and labels.Everything.
func selectorString(s labels.Selector) string {
	if _, selectable := s.Requirements(); !selectable {
		return "\x01"
	}
	return s.String()
}

// Namespaces maps the names of namespaces to their labels.
type Namespaces map[string]labels.Set

// Has reports whether p selects the pod. namespaces contains the labels of all namespaces.
func (p *PodSelector) Has(pod *v1.Pod, namespaces Namespaces) bool {
	return p.matches(subjectOf(pod), namespaces)
}

// podSubject contains the properties of a pod that decide whether a PodSelector selects it.
type podSubject struct {
	namespace   string
	labels      labels.Set
	terminating bool // the pod is being deleted
}

func subjectOf(pod *v1.Pod) *podSubject {
	return &podSubject{pod.Namespace, pod.Labels, pod.DeletionTimestamp != nil}
}

func (p *PodSelector) matches(s *podSubject, namespaces Namespaces) bool {
	if p.excludeTerminating && s.terminating {
		return false
	}
	return p.HasNamespace(s.namespace, namespaces[s.namespace]) && p.selector.Matches(s.labels)
}

// HasNamespace reports whether p selects pods in the namespace with the given name and labels.
func (p *PodSelector) HasNamespace(name string, set labels.Set) bool {
	if slices.Contains(p.namespaces, name) {
		return true
	}
	return p.nsSelector != nil && p.nsSelector.Matches(set)
}

// MaySelect reports whether p would select the pod for some labels of the pod's namespace. The
// actual labels of the namespace are not checked.
func (p *PodSelector) MaySelect(pod *v1.Pod) bool {
	if p.nsSelector == nil && !slices.Contains(p.namespaces, pod.Namespace) {
		return false
	}
	return p.selector.Matches(labels.Set(pod.Labels))
}

// HasNamespaceSelector reports whether p selects namespaces by their labels, and not only by their
// names.
func (p *PodSelector) HasNamespaceSelector() bool { return p.nsSelector != nil }

// Term is one parsed affinity or anti-affinity term of a pod. The PodSelector selects the other
// pods.
type Term struct {
	*PodSelector
	Key    string // topology key
	Weight int64  // weight of a preferred term; negative for anti-affinity
}

// Affinity contains the parsed inter-pod affinity and anti-affinity terms of a pod.
type Affinity struct {
	Required []Term // required affinity
	Avoided  []Term // required anti-affinity
	// Preferred contains the preferred affinity and anti-affinity terms. The weights of
	// anti-affinity terms are negative.
	Preferred []Term
}

// AffinityOf returns the parsed inter-pod affinity and anti-affinity terms of a pod, or nil if it
// has none.
func AffinityOf(pod *v1.Pod) *Affinity {
	a := pod.Spec.Affinity
	if a == nil || a.PodAffinity == nil && a.PodAntiAffinity == nil {
		return nil
	}
	out := &Affinity{}
	if x := a.PodAffinity; x != nil {
		out.Required = requiredTerms(pod, x.RequiredDuringSchedulingIgnoredDuringExecution)
		out.addPreferred(pod, x.PreferredDuringSchedulingIgnoredDuringExecution, 1)
	}
	if x := a.PodAntiAffinity; x != nil {
		out.Avoided = requiredTerms(pod, x.RequiredDuringSchedulingIgnoredDuringExecution)
		out.addPreferred(pod, x.PreferredDuringSchedulingIgnoredDuringExecution, -1)
	}
	if len(out.Required)+len(out.Avoided)+len(out.Preferred) == 0 {
		return nil
	}
	return out
}

func requiredTerms(pod *v1.Pod, list []v1.PodAffinityTerm) []Term {
	out := make([]Term, 0, len(list))
	for i := range list {
		out = append(out, newTerm(pod, &list[i], 0))
	}
	return out
}

func (a *Affinity) addPreferred(pod *v1.Pod, list []v1.WeightedPodAffinityTerm, sign int64) {
	for i := range list {
		a.Preferred = append(a.Preferred, newTerm(pod, &list[i].PodAffinityTerm, sign*int64(list[i].Weight)))
	}
}

func newTerm(pod *v1.Pod, t *v1.PodAffinityTerm, weight int64) Term {
	return Term{PodSelector: NewPodSelector(pod.Namespace, t.Namespaces, t.NamespaceSelector, t.LabelSelector),
		Key: t.TopologyKey, Weight: weight}
}

// podSelectorIndex holds items that have a PodSelector, for example a PodSet, and finds those that
// select a given pod. It does not check the items that cannot select the pod because of its
// namespace or labels.
type podSelectorIndex[T comparable] struct {
	selectorOf func(T) *PodSelector
	buckets    map[bucket][]T
}

func newPodSelectorIndex[T comparable](of func(T) *PodSelector) podSelectorIndex[T] {
	return podSelectorIndex[T]{selectorOf: of, buckets: make(map[bucket][]T)}
}

// addItem adds the item to the index. Of the buckets of the item's selector it uses the one with
// the fewest items, because all items in a bucket are checked for each pod with the bucket's label.
func (x *podSelectorIndex[T]) addItem(item T) {
	at := slices.MinFunc(x.selectorOf(item).buckets, func(a, b bucket) int {
		return len(x.buckets[a]) - len(x.buckets[b])
	})
	x.buckets[at] = append(x.buckets[at], item)
}

func (x *podSelectorIndex[T]) removeItem(item T) {
	for _, at := range x.selectorOf(item).buckets {
		list := x.buckets[at]
		i := slices.Index(list, item)
		if i < 0 {
			continue
		}
		if list = slices.Delete(list, i, i+1); len(list) == 0 {
			delete(x.buckets, at)
		} else {
			x.buckets[at] = list
		}
		return
	}
}

// forEachMatch calls f for each item whose PodSelector selects the pod. namespaces contains the
// labels of all namespaces.
func (x *podSelectorIndex[T]) forEachMatch(pod *podSubject, namespaces Namespaces, f func(T)) {
	if len(x.buckets) == 0 {
		return
	}
	look := func(at bucket) {
		for _, item := range x.buckets[at] {
			if x.selectorOf(item).matches(pod, namespaces) {
				f(item)
			}
		}
	}
	look(bucket{})
	look(bucket{namespace: pod.namespace})
	for k, v := range pod.labels {
		look(bucket{key: k, value: v})
		look(bucket{pod.namespace, k, v})
	}
}
