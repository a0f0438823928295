package framework

import (
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
)

// Peers selects pods by a label selector in some namespaces, for an affinity term or another rule
// about pods. It is immutable.
type Peers struct {
	// ID is a text that is equal for Peers with equal selectors and namespaces.
	ID string

	namespaces         []string        // sorted
	nsSelector         labels.Selector // selects further namespaces by their labels; nil = none
	selector           labels.Selector
	excludeTerminating bool     // terminating pods do not match
	buckets            []bucket // buckets in which an index may store it; any of them
}

// bucket is a key under which a peerIndex stores Peers: a namespace ("" = several) and one label
// that every matching pod must have (key "" = no such label).
type bucket struct{ namespace, key, value string }

// NewPeers returns the Peers of an affinity term with the given namespaces and selectors. own is
// the namespace of the pod with the term; it is used if the term has neither namespaces nor a
// namespace selector.
func NewPeers(own string, namespaces []string, nsSelector, selector *metav1.LabelSelector) *Peers {
	p := &Peers{selector: asSelector(selector)}
	if nsSelector != nil {
		p.nsSelector = asSelector(nsSelector)
	} else if len(namespaces) == 0 {
		namespaces = []string{own}
	}
	p.namespaces = slices.Compact(slices.Sorted(slices.Values(namespaces)))
	return p.initialize()
}

// PeersIn returns the Peers that select the pods of one namespace which match the selector and are
// not terminating.
func PeersIn(namespace string, selector labels.Selector) *Peers {
	p := &Peers{namespaces: []string{namespace}, selector: selector, excludeTerminating: true}
	return p.initialize()
}

// asSelector converts a label selector. The result for a nil or invalid selector matches nothing.
func asSelector(s *metav1.LabelSelector) labels.Selector {
	sel, err := metav1.LabelSelectorAsSelector(s)
	if err != nil {
		return labels.Nothing()
	}
	return sel
}

func (p *Peers) initialize() *Peers {
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

// selectorString returns the text of a selector. It distinguishes the selectors of nothing and of
// everything, which both print as "".
func selectorString(s labels.Selector) string {
	if _, selectable := s.Requirements(); !selectable {
		return "\x01"
	}
	return s.String()
}

// Namespaces maps the names of namespaces to their labels.
type Namespaces map[string]labels.Set

// Has reports whether the Peers select the pod. namespaces are the labels of all namespaces.
func (p *Peers) Has(pod *v1.Pod, namespaces Namespaces) bool {
	return p.matches(subjectOf(pod), namespaces)
}

// podSubject contains the properties of a pod on which the result of Peers.Has depends.
type podSubject struct {
	namespace   string
	labels      labels.Set
	terminating bool // the pod is being deleted
}

func subjectOf(pod *v1.Pod) *podSubject {
	return &podSubject{pod.Namespace, pod.Labels, pod.DeletionTimestamp != nil}
}

func (p *Peers) matches(s *podSubject, namespaces Namespaces) bool {
	if p.excludeTerminating && s.terminating {
		return false
	}
	return p.HasNamespace(s.namespace, namespaces[s.namespace]) && p.selector.Matches(s.labels)
}

// HasNamespace reports whether the Peers select the namespace with the given name and labels.
func (p *Peers) HasNamespace(name string, set labels.Set) bool {
	if slices.Contains(p.namespaces, name) {
		return true
	}
	return p.nsSelector != nil && p.nsSelector.Matches(set)
}

// MayMean reports whether the Peers can select the pod, for any labels of its namespace.
func (p *Peers) MayMean(pod *v1.Pod) bool {
	if p.nsSelector == nil && !slices.Contains(p.namespaces, pod.Namespace) {
		return false
	}
	return p.selector.Matches(labels.Set(pod.Labels))
}

// BySelector reports whether the Peers have a namespace selector.
func (p *Peers) BySelector() bool { return p.nsSelector != nil }

// Term is one parsed affinity or anti-affinity term of a pod.
type Term struct {
	*Peers
	Key    string // topology key
	Weight int64  // weight of a preferred term; negative for anti-affinity
}

// Affinity contains the parsed inter-pod affinity and anti-affinity terms of a pod.
type Affinity struct {
	Required []Term // required affinity
	Avoided  []Term // required anti-affinity
	// Preferred are the preferred terms of both kinds. The weights of anti-affinity terms are
	// negative.
	Preferred []Term
}

// AffinityOf returns the inter-pod affinity of a pod, or nil if the pod has no terms.
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
	return Term{Peers: NewPeers(pod.Namespace, t.Namespaces, t.NamespaceSelector, t.LabelSelector), Key: t.TopologyKey, Weight: weight}
}

// peerIndex finds the items with Peers that select a pod. It does not check items for other
// namespaces and labels.
type peerIndex[T comparable] struct {
	peersOf func(T) *Peers
	buckets map[bucket][]T
}

func newPeerIndex[T comparable](of func(T) *Peers) peerIndex[T] {
	return peerIndex[T]{peersOf: of, buckets: make(map[bucket][]T)}
}

// addItem stores the item in that of its possible buckets which has the fewest items. A bucket for
// a label that all pods have would hold many items and be searched for every pod.
func (x *peerIndex[T]) addItem(item T) {
	at := slices.MinFunc(x.peersOf(item).buckets, func(a, b bucket) int { return len(x.buckets[a]) - len(x.buckets[b]) })
	x.buckets[at] = append(x.buckets[at], item)
}

func (x *peerIndex[T]) removeItem(item T) {
	for _, at := range x.peersOf(item).buckets {
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

// forEachMatch calls f for every item with Peers that select the pod.
func (x *peerIndex[T]) forEachMatch(pod *podSubject, namespaces Namespaces, f func(T)) {
	if len(x.buckets) == 0 {
		return
	}
	look := func(at bucket) {
		for _, item := range x.buckets[at] {
			if x.peersOf(item).matches(pod, namespaces) {
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
