package loadbalancer

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api/balancer"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers"
)

// announce sees that a node that is fit answers for a Service. Who answers goes on as long as it is fit, also when others
// have less to do: each move ends connections.
func (r *reconciler) announce(ctx context.Context, s *corev1.Service) error {
	addresses := given(s)
	if len(addresses) == 0 {
		_, err := r.assign(ctx, s, "")
		return err
	}
	key := controllers.KeyOf(s)
	var only map[string]bool
	if local(s) {
		only = withEndpoints(controllers.CachedBy[*discoveryv1.EndpointSlice](r.slices, sliceIndex, key.String()))
	}
	now := r.answers(s)
	why := r.fit(now)
	if why == "" && only != nil && !only[now] {
		why = "it has no ready endpoint"
	}
	next := now
	if why != "" {
		next = Pick(key, r.candidates(key, only))
		if next == "" && only == nil {
			next = now // who is only suspected may still answer
		}
	}
	moved, err := r.assign(ctx, s, next)
	if err != nil || !moved || next == "" {
		return err
	}
	var named []string
	for _, a := range addresses {
		named = append(named, a.String())
	}
	if message := fmt.Sprintf("node %s answers for %s now", next, strings.Join(named, " and ")); now == "" || now == next {
		r.term.Events.Event(s, corev1.EventTypeNormal, "Announced", message)
	} else {
		r.term.Events.Eventf(s, corev1.EventTypeNormal, "AnnouncementMoved", "%s, no longer %s: %s", message, now, why)
	}
	return nil
}

// candidates are the nodes that may answer for a Service, those in only where that is not nil.
func (r *reconciler) candidates(key controllers.Key, only map[string]bool) []Candidate {
	var out []Candidate
	nodes := controllers.CachedAll[*corev1.Node](r.nodes)
	r.seed()
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, n := range nodes {
		if only != nil && !only[n.Name] || r.fit(n.Name) != "" {
			continue
		}
		load := r.load[n.Name]
		if r.by[key] == n.Name {
			load--
		}
		out = append(out, Candidate{n.Name, load})
	}
	return out
}

// seed counts who answers as the cache has it, for Services of which nothing was written in this term.
func (r *reconciler) seed() {
	services := controllers.CachedBy[*corev1.Service](r.services, serviceIndex, allOurs)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.seeded {
		return
	}
	r.seeded = true
	for _, s := range services {
		if key := controllers.KeyOf(s); r.by[key] == "" {
			r.placed(key, s.Annotations[balancer.AnnouncedBy])
		}
	}
}

// answers is the node that answers for a Service: who was chosen last, also where somebody took the annotation away.
func (r *reconciler) answers(s *corev1.Service) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if node, ok := r.by[controllers.KeyOf(s)]; ok {
		return node
	}
	return s.Annotations[balancer.AnnouncedBy]
}

// place remembers who answers for a Service.
func (r *reconciler) place(key controllers.Key, node string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.placed(key, node)
}

func (r *reconciler) placed(key controllers.Key, node string) {
	if before := r.by[key]; before != "" {
		if r.load[before]--; r.load[before] == 0 {
			delete(r.load, before)
		}
	}
	if node == "" {
		delete(r.by, key)
		return
	}
	r.by[key] = node
	r.load[node]++
}

// assign writes who answers for a Service; "" = nobody. It says whether that is new.
func (r *reconciler) assign(ctx context.Context, s *corev1.Service, node string) (bool, error) {
	key := controllers.KeyOf(s)
	r.place(key, node)
	has, there := s.Annotations[balancer.AnnouncedBy]
	if has == node && there == (node != "") {
		return false, nil
	}
	var value any
	if node != "" {
		value = node
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": map[string]any{balancer.AnnouncedBy: value}}})
	if err != nil {
		return false, fmt.Errorf("writing who answers for service %s: %w", key, err)
	}
	stored, err := client.Patch[*corev1.Service](ctx, r.term.Client, key.Namespace, key.Name, "", types.MergePatchType, patch)
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("writing who answers for service %s: %w", key, err)
	}
	r.view.Wrote(stored)
	return true, nil
}
