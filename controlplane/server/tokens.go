package server

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/validation"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/pki"
)

// What a join token may allow, and what it allows when nothing is said.
const (
	maxTokenLife     = 365 * 24 * time.Hour
	nodeTokenLife    = 24 * time.Hour
	replicaTokenLife = time.Hour
	maxTokenUses     = 10000
	maxTokenNames    = 1000
)

// serveTokens answers POST /cluster/tokens with a new join token; authorization has happened.
func (r *Replica) serveTokens(w http.ResponseWriter, req *http.Request, d *deed) {
	var q api.ClusterToken
	if !posted(w, req, &q) {
		return
	}
	d.object, d.more = q.Role, []any{"ttl", q.TTL, "uses", q.Uses, "names", strings.Join(q.Names, ",")}
	role, grant, err := tokenGrant(q, time.Now())
	if err != nil {
		refuse(w, http.StatusBadRequest, err)
		return
	}
	grant.Note = "made by " + api.CallerOf(req.Context()).User.Name
	t := pki.NewToken(role, r.ca.Signs().Cert)
	if err := r.recordToken(req.Context(), 0, t, grant); err != nil {
		refuse(w, http.StatusInternalServerError, err)
		return
	}
	d.more = append(d.more, "token", t.ID) // by which one finds who has joined with it
	answer(w, api.ClusterTokenResult{Token: t.String()})
}

// tokenGrant is what is asked for, completed: one use, of a day for nodes and of an hour for a replica.
func tokenGrant(q api.ClusterToken, now time.Time) (pki.Role, pki.Grant, error) {
	refuse := func(format string, args ...any) (pki.Role, pki.Grant, error) {
		return "", pki.Grant{}, fmt.Errorf(format, args...)
	}
	role := pki.Role(q.Role)
	life := nodeTokenLife
	switch role {
	case pki.RoleNode:
	case pki.RoleControlPlane:
		life = replicaTokenLife
	default:
		return refuse("role %q: want %s or %s", role, pki.RoleNode, pki.RoleControlPlane)
	}
	if q.TTL != "" {
		var err error
		if life, err = time.ParseDuration(q.TTL); err != nil {
			return refuse("ttl %q: want a duration such as 24h", q.TTL)
		}
	}
	if life <= 0 || life > maxTokenLife {
		return refuse("ttl: want more than 0 and at most 8760h")
	}
	g := pki.Grant{Expires: now.Add(life), Uses: q.Uses, Names: q.Names, Replace: q.Replace}
	switch {
	case g.Uses == 0:
		g.Uses = max(1, len(g.Names))
	case g.Uses < 0 || g.Uses > maxTokenUses:
		return refuse("uses %d: want 1 to %d", g.Uses, maxTokenUses)
	}
	if len(g.Names) > maxTokenNames {
		return refuse("names: %d of them, want at most %d", len(g.Names), maxTokenNames)
	}
	for _, n := range g.Names {
		if msgs := validation.IsDNS1123Subdomain(n); len(msgs) > 0 {
			return refuse("names: %q: %s", n, strings.Join(msgs, "; "))
		}
	}
	if g.Replace && (role != pki.RoleNode || len(g.Names) == 0) {
		return refuse("replace: a token that takes over Nodes which exist is for role %s and states their names",
			pki.RoleNode)
	}
	return role, g, nil
}

// recordToken stores what stands for a join token.
func (r *Replica) recordToken(ctx context.Context, fence uint64, t pki.Token, g pki.Grant) error {
	if t.Role == "" || g.Uses == 0 {
		return errors.New("a join token needs a role and a number of uses")
	}
	c := r.client.As(api.User{Name: api.UserAPIServer,
		Groups: []string{api.GroupMasters, api.GroupAuthenticated}}).Fenced(fence).ForClusterVerb()
	_, err := client.Create[*v1.Secret](ctx, c, r.trust.TokenKey().Record(t, g))
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("recording join token %s: %w", t.ID, err)
	}
	return nil
}

// serveRevoke answers POST /cluster/revoke: what a node was given to prove who it is counts no more.
func (r *Replica) serveRevoke(w http.ResponseWriter, req *http.Request, d *deed) {
	var q api.ClusterRevoke
	if !posted(w, req, &q) {
		return
	}
	d.object = q.Node
	c := r.client.As(api.User{Name: api.UserAPIServer, Groups: []string{api.GroupMasters, api.GroupAuthenticated}})
	_, err := client.Get[*v1.Node](req.Context(), c, "", q.Node)
	if apierrors.IsNotFound(err) || q.Node == "" {
		refuse(w, http.StatusNotFound, fmt.Errorf("node %q: there is no Node of this name; the certificates of one that was deleted are revoked", q.Node))
		return
	}
	if err == nil {
		err = r.fleet.Revoke(req.Context(), q.Node)
	}
	if err != nil {
		refuse(w, http.StatusServiceUnavailable, err)
		return
	}
	answer(w, q)
}
