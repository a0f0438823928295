package operator

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
	"keelson.dev/keelson/controlplane/api/clusterhttp"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/pki"
)

// Limits of join tokens.
const (
	maxTokenLife  = 365 * 24 * time.Hour
	maxTokenNames = 1000
)

// serveTokens answers POST /cluster/tokens with a new join token.
func (v *API) serveTokens(w http.ResponseWriter, req *http.Request, o *operation) {
	var q api.ClusterToken
	if !decodePost(w, req, &q) {
		return
	}
	o.object, o.attributes = q.Role, []any{"ttl", q.TTL, "uses", q.Uses, "names", strings.Join(q.Names, ",")}
	role, grant, err := parseTokenRequest(q, time.Now())
	if err != nil {
		clusterhttp.WriteError(w, http.StatusBadRequest, err)
		return
	}
	grant.Note = "created by " + api.CallerOf(req.Context()).User.Name
	t := pki.NewToken(role, v.config.CA.SigningCA().Cert)
	if err := v.RecordToken(req.Context(), 0, t, grant); err != nil {
		clusterhttp.WriteError(w, http.StatusInternalServerError, err)
		return
	}
	o.attributes = append(o.attributes, "token", t.ID) // the log of joins contains this ID
	clusterhttp.WriteJSON(w, api.ClusterTokenResult{Token: t.String()})
}

// parseTokenRequest returns the role and the permissions of a requested join token. By default, a
// token has one use for each of its names, or one use without names. It is valid for a day for
// nodes and for an hour for replicas.
func parseTokenRequest(q api.ClusterToken, now time.Time) (pki.Role, pki.Grant, error) {
	fail := func(format string, args ...any) (pki.Role, pki.Grant, error) {
		return "", pki.Grant{}, fmt.Errorf(format, args...)
	}
	role := pki.Role(q.Role)
	life := pki.NodeTokenLife
	switch role {
	case pki.RoleNode:
	case pki.RoleControlPlane:
		life = pki.ReplicaTokenLife
	default:
		return fail("role %q: want %s or %s", role, pki.RoleNode, pki.RoleControlPlane)
	}
	if q.TTL != "" {
		var err error
		if life, err = time.ParseDuration(q.TTL); err != nil {
			return fail("ttl %q: want a duration such as 24h", q.TTL)
		}
	}
	if life <= 0 || life > maxTokenLife {
		return fail("ttl: want more than 0 and at most 8760h")
	}
	g := pki.Grant{Expires: now.Add(life), Uses: q.Uses, Names: q.Names, Replace: q.Replace}
	switch {
	case g.Uses == 0:
		g.Uses = max(1, len(g.Names))
	case g.Uses < 0 || g.Uses > pki.MaxTokenUses:
		return fail("uses %d: want 1 to %d", g.Uses, pki.MaxTokenUses)
	}
	if len(g.Names) > maxTokenNames {
		return fail("names: %d names, want at most %d", len(g.Names), maxTokenNames)
	}
	for _, n := range g.Names {
		if msgs := validation.IsDNS1123Subdomain(n); len(msgs) > 0 {
			return fail("names: %q: %s", n, strings.Join(msgs, "; "))
		}
	}
	if g.Replace && (role != pki.RoleNode || len(g.Names) == 0) {
		return fail("replace: a token that replaces existing Nodes needs role %s and their names", pki.RoleNode)
	}
	return role, g, nil
}

// RecordToken stores the Secret of a join token unless it exists. If fence is not 0, the Secret is
// written only during that raft term.
func (v *API) RecordToken(ctx context.Context, fence uint64, t pki.Token, g pki.Grant) error {
	if t.Role == "" || g.Uses == 0 {
		return errors.New("a join token needs a role and a number of uses")
	}
	c := v.apiServerClient().Fenced(fence).ForClusterVerb()
	_, err := client.Create[*v1.Secret](ctx, c, v.config.Tokens.Record(t, g))
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("recording join token %s: %w", t.ID, err)
	}
	return nil
}

func (v *API) apiServerClient() *client.Client {
	return v.client.As(api.User{Name: api.UserAPIServer, Groups: []string{api.GroupMasters, api.GroupAuthenticated}})
}

// serveRevoke answers POST /cluster/revoke: it revokes the certificates of a node.
func (v *API) serveRevoke(w http.ResponseWriter, req *http.Request, o *operation) {
	var q api.ClusterRevoke
	if !decodePost(w, req, &q) {
		return
	}
	o.object = q.Node
	_, err := client.Get[*v1.Node](req.Context(), v.apiServerClient(), "", q.Node)
	if apierrors.IsNotFound(err) || q.Node == "" {
		clusterhttp.WriteError(w, http.StatusNotFound,
			fmt.Errorf("node %q: there is no Node of this name; the certificates of a deleted Node are revoked already",
				q.Node))
		return
	}
	if err == nil {
		err = v.config.Nodes.Revoke(req.Context(), q.Node)
	}
	if err != nil {
		clusterhttp.WriteError(w, http.StatusServiceUnavailable, err)
		return
	}
	clusterhttp.WriteJSON(w, q)
}
