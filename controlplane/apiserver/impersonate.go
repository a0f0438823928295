package apiserver

import (
	"context"
	"net/http"
	"net/url"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/authz"
)

// Headers in which a client requests to act as another user (kubectl --as).
const (
	impersonateUser  = "Impersonate-User"
	impersonateGroup = "Impersonate-Group"
	impersonateUID   = "Impersonate-Uid"
	impersonateExtra = "Impersonate-Extra-"
)

// resolveUser returns the user as which the request is performed: the user in the impersonation
// headers, or the sender if the request has no such headers. The sender must be allowed to
// impersonate each part of the requested identity. resolveUser removes the headers from the
// request.
func (s *Server) resolveUser(r *http.Request, sender api.User) (api.User, error) {
	as := api.User{Name: r.Header.Get(impersonateUser), UID: r.Header.Get(impersonateUID),
		Groups: r.Header.Values(impersonateGroup)}
	for name, values := range r.Header {
		if key, ok := strings.CutPrefix(name, impersonateExtra); ok {
			if as.Extra == nil {
				as.Extra = map[string][]string{}
			}
			as.Extra[extraKey(key)] = values
		}
	}
	if as.Name == "" {
		if as.UID != "" || len(as.Groups) > 0 || len(as.Extra) > 0 {
			return api.User{},
				apierrors.NewBadRequest("requested to impersonate without naming a user: Impersonate-User is missing")
		}
		return sender, nil
	}
	if err := s.mayImpersonate(r.Context(), sender, as); err != nil {
		return api.User{}, err
	}
	for name := range r.Header {
		if strings.HasPrefix(name, "Impersonate-") {
			r.Header.Del(name)
		}
	}
	return withImpliedGroups(as), nil
}

// extraKey decodes the key of a user's extra field from the name of an Impersonate-Extra header,
// which is lower case and may be percent-encoded.
func extraKey(key string) string {
	key = strings.ToLower(key)
	if plain, err := url.PathUnescape(key); err == nil {
		return plain
	}
	return key
}

func (s *Server) mayImpersonate(ctx context.Context, sender, target api.User) error {
	check := func(a authz.Attributes) error {
		a.User, a.Verb, a.APIVersion = sender, "impersonate", "v1"
		return s.pipeline.authorizeAttributes(ctx, &a, nil)
	}
	who := authz.Attributes{Resource: "users", Name: target.Name}
	if ns, name, ok := serviceAccount(target.Name); ok {
		who = authz.Attributes{Resource: "serviceaccounts", Namespace: ns, Name: name}
	}
	if err := check(who); err != nil {
		return err
	}
	for _, g := range target.Groups {
		if err := check(authz.Attributes{Resource: "groups", Name: g}); err != nil {
			return err
		}
	}
	if target.UID != "" {
		if err := check(authz.Attributes{APIGroup: "authentication.k8s.io", Resource: "uids", Name: target.UID}); err !=
			nil {
			return err
		}
	}
	for key, values := range target.Extra {
		for _, v := range values {
			if err := check(authz.Attributes{APIGroup: "authentication.k8s.io", Resource: "userextras",
				Subresource: key, Name: v}); err != nil {
				return err
			}
		}
	}
	return nil
}

func serviceAccount(user string) (namespace, name string, ok bool) {
	rest, ok := strings.CutPrefix(user, api.ServiceAccountPrefix)
	if !ok {
		return "", "", false
	}
	namespace, name, ok = strings.Cut(rest, ":")
	return namespace, name, ok && namespace != "" && name != ""
}

// withImpliedGroups returns u with the groups that its name implies: the groups of a service
// account, and system:authenticated or system:unauthenticated.
func withImpliedGroups(u api.User) api.User {
	if ns, _, ok := serviceAccount(u.Name); ok && len(u.Groups) == 0 {
		u.Groups = []string{api.GroupServiceAccounts, api.GroupServiceAccounts + ":" + ns}
	}
	nature := api.GroupAuthenticated
	if u.Name == api.UserAnonymous {
		nature = api.GroupUnauthenticated
	}
	for _, g := range u.Groups {
		if g == api.GroupAuthenticated || g == api.GroupUnauthenticated {
			return u
		}
	}
	u.Groups = append(u.Groups[:len(u.Groups):len(u.Groups)], nature)
	return u
}
