package framework

import (
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
)

// Peers says which pods a rule is about: those whose labels a selector matches, in some namespaces. It is immutable.
type Peers struct {
	// ID is equal for Peers that mean the same pods.
	ID string

	namespaces []string        // sorted
	nsSelector labels.Selector // more namespaces, by their labels; nil = none
	selector   labels.Selector
	staying    bool     // pods that are being deleted are not meant
	at         []bucket // any of them
}

// bucket is where an index may look for Peers: a namespace ("" = several) and one label that every pod meant has
// ("" = no such label).
type bucket struct{ namespace, key, value string }

// NewPeers makes Peers of an affinity term's parts; own is the namespace of the pod that has the term, which is meant
// when the term names none.
func NewPeers(own string, namespaces []string, nsSelector, selector *metav1.LabelSelector) *Peers {
	p := &Peers{selector: asSelector(selector)}
	if nsSelector != nil {
		p.nsSelector = asSelector(nsSelector)
	} else if len(namespaces) == 0 {
		namespaces = []string{own}
	}
	p.namespaces = slices.Compact(slices.Sorted(slices.Values(namespaces)))
	return p.finish()
}

// PeersIn are the pods of one namespace that the selector matches and that are not being deleted.
func PeersIn(namespace string, selector labels.Selector) *Peers {
	p := &Peers{namespaces: []string{namespace}, selector: selector, staying: true}
	return p.finish()
}

// asSelector reads a selector; nil, and one that cannot be read, match nothing.
func asSelector(s *metav1.LabelSelector) labels.Selector {
	sel, err := metav1.LabelSelectorAsSelector(s)
	if err != nil {
		return labels.Nothing()
	}
	return sel
}

func (p *Peers) finish() *Peers {
	var id strings.Builder
	for _, ns := range p.namespaces {
		id.WriteString(ns)
		id.WriteByte(',')
	}
	id.WriteByte(0)
	if p.nsSelector != nil {
		id.WriteString(describe(p.nsSelector))
	} else {
		id.WriteByte(1)
	}
	id.WriteByte(0)
	id.WriteString(describe(p.selector))
	if p.staying {
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
				p.at = append(p.at, bucket{namespace, r.Key(), values[0]})
			}
		}
	}
	if len(p.at) == 0 {
		p.at = []bucket{{namespace: namespace}}
	}
	return p
}

// describe tells the selector of nothing from that of everything: both print as nothing.
func describe(s labels.Selector) string {
	if _, selectable := s.Requirements(); !selectable {
		return "\x01"
	}
	return s.String()
}

// Namespaces maps namespaces to their labels.
type Namespaces map[string]labels.Set

// Has says whether the pod is one of those meant.
func (p *Peers) Has(pod *v1.Pod, namespaces Namespaces) bool {
	return p.means(subjectOf(pod), namespaces)
}

// subject is what Peers go by of a pod.
type subject struct {
	namespace string
	labels    labels.Set
	ending    bool // it is being deleted
}

func subjectOf(p *v1.Pod) *subject {
	return &subject{p.Namespace, p.Labels, p.DeletionTimestamp != nil}
}

func (p *Peers) means(s *subject, namespaces Namespaces) bool {
	if p.staying && s.ending {
		return false
	}
	return p.HasNamespace(s.namespace, namespaces[s.namespace]) && p.selector.Matches(s.labels)
}

// HasNamespace says whether pods of a namespace with these labels may be meant.
func (p *Peers) HasNamespace(name string, set labels.Set) bool {
	if slices.Contains(p.namespaces, name) {
		return true
	}
	return p.nsSelector != nil && p.nsSelector.Matches(set)
}

// MayMean says whether the pod may be meant, whatever the labels of its namespace.
func (p *Peers) MayMean(pod *v1.Pod) bool {
	if p.nsSelector == nil && !slices.Contains(p.namespaces, pod.Namespace) {
		return false
	}
	return p.selector.Matches(labels.Set(pod.Labels))
}

// BySelector says whether the namespaces meant follow from their labels.
func (p *Peers) BySelector() bool { return p.nsSelector != nil }

// Term is an affinity term of a pod made ready.
type Term struct {
	*Peers
	Key    string // of the topology
	Weight int64  // of a preferred term: negative when those pods are shunned
}

// Affinity is what a pod wants of other pods.
type Affinity struct {
	Required []Term // beside one of these
	Avoided  []Term // beside none of these
	// Preferred are the terms that only weigh, with their sign.
	Preferred []Term
}

// AffinityOf reads a pod's terms; nil when it has none.
func AffinityOf(p *v1.Pod) *Affinity {
	a := p.Spec.Affinity
	if a == nil || a.PodAffinity == nil && a.PodAntiAffinity == nil {
		return nil
	}
	out := &Affinity{}
	if x := a.PodAffinity; x != nil {
		out.Required = requiredTerms(p, x.RequiredDuringSchedulingIgnoredDuringExecution)
		out.prefer(p, x.PreferredDuringSchedulingIgnoredDuringExecution, 1)
	}
	if x := a.PodAntiAffinity; x != nil {
		out.Avoided = requiredTerms(p, x.RequiredDuringSchedulingIgnoredDuringExecution)
		out.prefer(p, x.PreferredDuringSchedulingIgnoredDuringExecution, -1)
	}
	if len(out.Required)+len(out.Avoided)+len(out.Preferred) == 0 {
		return nil
	}
	return out
}

func requiredTerms(p *v1.Pod, list []v1.PodAffinityTerm) []Term {
	out := make([]Term, 0, len(list))
	for i := range list {
		out = append(out, newTerm(p, &list[i], 0))
	}
	return out
}

func (a *Affinity) prefer(p *v1.Pod, list []v1.WeightedPodAffinityTerm, sign int64) {
	for i := range list {
		a.Preferred = append(a.Preferred, newTerm(p, &list[i].PodAffinityTerm, sign*int64(list[i].Weight)))
	}
}

func newTerm(p *v1.Pod, t *v1.PodAffinityTerm, weight int64) Term {
	return Term{Peers: NewPeers(p.Namespace, t.Namespaces, t.NamespaceSelector, t.LabelSelector), Key: t.TopologyKey, Weight: weight}
}

// peerIndex finds, for a pod, the items whose Peers it is one of, without looking at those of other namespaces
// and labels.
type peerIndex[T comparable] struct {
	of      func(T) *Peers
	buckets map[bucket][]T
}

func newPeerIndex[T comparable](of func(T) *Peers) peerIndex[T] {
	return peerIndex[T]{of: of, buckets: make(map[bucket][]T)}
}

// add puts the item where there are fewest: labels that all pods have tell nobody apart.
func (x *peerIndex[T]) add(item T) {
	at := slices.MinFunc(x.of(item).at, func(a, b bucket) int { return len(x.buckets[a]) - len(x.buckets[b]) })
	x.buckets[at] = append(x.buckets[at], item)
}

func (x *peerIndex[T]) remove(item T) {
	for _, at := range x.of(item).at {
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

// each calls f for every item that means the pod.
func (x *peerIndex[T]) each(pod *subject, namespaces Namespaces, f func(T)) {
	if len(x.buckets) == 0 {
		return
	}
	look := func(at bucket) {
		for _, item := range x.buckets[at] {
			if x.of(item).means(pod, namespaces) {
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
