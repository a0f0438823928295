package framework

import (
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
)

// Services is an index of Services by their selectors. It finds the Services that select a pod
// without checking all of them.
type Services struct {
	byName map[string]*service
	index  peerIndex[*service]
}

type service struct {
	peers    *Peers
	selector map[string]string
}

// NewServices returns an empty index of Services.
func NewServices() *Services {
	return &Services{byName: make(map[string]*service), index: newPeerIndex(func(s *service) *Peers { return s.peers })}
}

// Set stores or replaces the selector of a Service. An empty selector, which selects no pods,
// removes the Service.
func (s *Services) Set(namespace, name string, selector map[string]string) {
	key := namespace + "/" + name
	if have := s.byName[key]; have != nil {
		s.index.removeItem(have)
		delete(s.byName, key)
	}
	if len(selector) == 0 {
		return
	}
	one := &service{peers: PeersIn(namespace, labels.SelectorFromSet(selector)), selector: selector}
	s.byName[key] = one
	s.index.addItem(one)
}

// Of returns the selectors of all Services that select the pod.
func (s *Services) Of(pod *v1.Pod) []map[string]string {
	var out []map[string]string
	s.index.forEachMatch(subjectOf(pod), nil, func(one *service) { out = append(out, one.selector) })
	return out
}
