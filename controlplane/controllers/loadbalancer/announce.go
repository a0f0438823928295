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
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// chooseAnnouncer ensures that a suitable node announces the addresses of Service s. The current
// node is kept while it is suitable, even if other nodes announce fewer Services, because each move
// breaks connections.
func (r *reconciler) chooseAnnouncer(ctx context.Context, s *corev1.Service) error {
	addresses := statusAddresses(s)
	if len(addresses) == 0 {
		_, err := r.writeAnnouncer(ctx, s, "")
		return err
	}
	key := engine.KeyOf(s)
	var only map[string]bool
	if isLocalTraffic(s) {
		only = withEndpoints(engine.CachedBy[*discoveryv1.EndpointSlice](r.slices, sliceIndex, key.String()))
	}
	now := r.announcers.currentAnnouncer(s)
	why := r.unfitReason(now)
	if why == "" && only != nil && !only[now] {
		why = "it has no ready endpoint"
	}
	next := now
	if why != "" {
		next = PickAnnouncer(key, r.announcerCandidates(key, only))
		if next == "" && only == nil {
			next = now // no node is suitable: the current node may still announce, although it appears to have failed
		}
	}
	moved, err := r.writeAnnouncer(ctx, s, next)
	if err != nil || !moved || next == "" {
		return err
	}
	var named []string
	for _, a := range addresses {
		named = append(named, a.String())
	}
	if message := fmt.Sprintf("node %s announces %s now", next, strings.Join(named, " and ")); now == "" ||
		now == next {
		r.term.Events.Event(s, corev1.EventTypeNormal, "Announced", message)
	} else {
		r.term.Events.Eventf(s, corev1.EventTypeNormal, "AnnouncementMoved", "%s, no longer %s: %s", message, now, why)
	}
	return nil
}

// announcerCandidates returns the nodes that may announce the Service with this key. If allowed is
// not nil, nodes that are not in it are excluded.
func (r *reconciler) announcerCandidates(key engine.Key, allowed map[string]bool) []Candidate {
	var out []Candidate
	nodes := engine.CachedAll[*corev1.Node](r.nodes)
	r.announcers.loadAnnouncers()
	r.announcers.mu.Lock()
	defer r.announcers.mu.Unlock()
	for _, n := range nodes {
		if allowed != nil && !allowed[n.Name] || r.unfitReason(n.Name) != "" {
			continue
		}
		load := r.announcers.load[n.Name]
		if r.announcers.by[key] == n.Name {
			load--
		}
		out = append(out, Candidate{n.Name, load})
	}
	return out
}

// loadAnnouncers reads, once in a term of leadership, the announcing node of each Service from the
// cache. It skips Services for which this term has already written a node.
func (a *announcers) loadAnnouncers() {
	services := engine.CachedBy[*corev1.Service](a.services, serviceIndex, allOurs)
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.seeded {
		return
	}
	a.seeded = true
	for _, s := range services {
		if key := engine.KeyOf(s); a.by[key] == "" {
			a.setAnnouncer(key, s.Annotations[balancer.AnnouncedBy])
		}
	}
}

// currentAnnouncer returns the node that announces Service s: the node that this term wrote last,
// even if a user has removed the annotation since. Otherwise it returns the node in the annotation.
func (a *announcers) currentAnnouncer(s *corev1.Service) string {
	a.mu.Lock()
	defer a.mu.Unlock()
	if node, ok := a.by[engine.KeyOf(s)]; ok {
		return node
	}
	return s.Annotations[balancer.AnnouncedBy]
}

// recordAnnouncer records in memory which node announces the Service with this key; "" means that
// no node announces it.
func (a *announcers) recordAnnouncer(key engine.Key, node string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.setAnnouncer(key, node)
}

func (a *announcers) setAnnouncer(key engine.Key, node string) {
	if before := a.by[key]; before != "" {
		if a.load[before]--; a.load[before] == 0 {
			delete(a.load, before)
		}
	}
	if node == "" {
		delete(a.by, key)
		return
	}
	a.by[key] = node
	a.load[node]++
}

// writeAnnouncer writes the node that announces Service s to an annotation of s; "" removes the
// annotation. It reports whether the annotation changed.
func (r *reconciler) writeAnnouncer(ctx context.Context, s *corev1.Service, node string) (bool, error) {
	key := engine.KeyOf(s)
	r.announcers.recordAnnouncer(key, node)
	has, there := s.Annotations[balancer.AnnouncedBy]
	if has == node && there == (node != "") {
		return false, nil
	}
	var value any
	if node != "" {
		value = node
	}
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"annotations": map[string]any{balancer.AnnouncedBy: value}}})
	if err != nil {
		return false, fmt.Errorf("writing the announcing node of service %s: %w", key, err)
	}
	stored, err := client.Patch[*corev1.Service](ctx, r.term.Client, key.Namespace, key.Name, "",
		types.MergePatchType, patch)
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("writing the announcing node of service %s: %w", key, err)
	}
	r.view.RecordWrite(stored)
	return true, nil
}
