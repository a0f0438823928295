package framework

import (
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
)

// Services is an index of Services by their pod selectors. It finds the Services that select a
// given pod without checking every Service.
type Services struct {
	byName map[string]*service
	index  podSelectorIndex[*service]
}

type service struct {
	podSelector *PodSelector
	selector    map[string]string
}

// NewServices returns an empty index of Services.
func NewServices() *Services {
	return &Services{byName: make(map[string]*service),
		index: newPodSelectorIndex(func(s *service) *PodSelector { return s.podSelector })}
}

// Set adds a Service with the given pod selector, or replaces its selector. An empty selector,
// which selects no pods, removes the Service.
func (s *Services) Set(namespace, name string, selector map[string]string) {
	key := namespace + "/" + name
	if have := s.byName[key]; have != nil {
		s.index.removeItem(have)
		delete(s.byName, key)
	}
	if len(selector) == 0 {
		return
	}
	one := &service{podSelector: NewNamespacePodSelector(namespace, labels.SelectorFromSet(selector)),
		selector: selector}
	s.byName[key] = one
	s.index.addItem(one)
}

// Of returns the pod selectors of all Services that select the pod.
func (s *Services) Of(pod *v1.Pod) []map[string]string {
	var out []map[string]string
	s.index.forEachMatch(subjectOf(pod), nil, func(one *service) { out = append(out, one.selector) })
	return out
}
