// Package authz is stage 2 of the request pipeline: it decides whether the user may perform the
// request. Authorizers run in order; the first one that allows or denies the request decides. A
// request that no authorizer allows is rejected. RBAC and node rules are in memory and are updated
// by watches, so that a decision never waits for the store.
package authz

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
)

// Attributes are the input of an authorization decision: a verb on a resource, or on a non-resource
// path.
type Attributes struct {
	User        api.User
	Verb        string
	Namespace   string
	APIGroup    string
	APIVersion  string
	Resource    string // "" = a non-resource request for Path
	Subresource string
	Name        string
	Path        string
	// FieldSelector restricts a list or watch; nil = no restriction.
	FieldSelector fields.Selector
	// LabelSelector restricts a list or watch, in string form; "" = no restriction.
	LabelSelector string
	// WantReason requests a reason also if the decision is Allow.
	WantReason bool
}

// Decision is the decision of an authorizer on a request: NoOpinion, Allow or Deny.
type Decision int

// NoOpinion leaves the decision to the next authorizer.
const (
	NoOpinion Decision = iota
	Allow
	Deny
)

// Authorizer decides whether a request is allowed. The reason is for humans and may be empty.
type Authorizer interface {
	Authorize(ctx context.Context, a *Attributes) (Decision, string)
}

// Union is a list of authorizers that run in order.
type Union []Authorizer

// Authorize returns the first decision that is not NoOpinion. If all decisions are NoOpinion, it
// returns NoOpinion with the joined reasons of all authorizers.
func (u Union) Authorize(ctx context.Context, a *Attributes) (Decision, string) {
	var reasons []string
	for _, z := range u {
		d, reason := z.Authorize(ctx, a)
		if d != NoOpinion {
			return d, reason
		}
		if reason != "" {
			reasons = append(reasons, reason)
		}
	}
	return NoOpinion, strings.Join(reasons, "\n")
}

// Privileged allows everything to members of system:masters. It allows nothing because of a user
// name: a user with the permission to impersonate users could take any name. Components of this
// process that need all permissions are members of the group.
type Privileged struct{}

// Authorize returns Allow for a member of system:masters, otherwise NoOpinion.
func (Privileged) Authorize(_ context.Context, a *Attributes) (Decision, string) {
	for _, g := range a.User.Groups {
		if g == api.GroupMasters {
			return Allow, ""
		}
	}
	return NoOpinion, ""
}

// Of returns the authorization attributes of a request for a resource.
func Of(r *api.Request) *Attributes {
	a := &Attributes{
		User: r.User, Verb: string(r.Verb), Namespace: r.Namespace,
		APIGroup: r.Kind.GVK.Group, APIVersion: r.Kind.GVK.Version,
		Resource: r.Kind.Resource, Subresource: r.Subresource, Name: r.Name,
	}
	switch r.Verb {
	case api.VerbConnect:
		// Reading a log requires "get". Every other connect subresource, such as exec, requires
		// "create", whatever the HTTP method.
		a.Verb = string(api.VerbCreate)
		if r.Subresource == "log" {
			a.Verb = string(api.VerbGet)
		}
	case api.VerbList, api.VerbWatch, api.VerbDeleteCollection:
		a.LabelSelector = r.List.LabelSelector
		if r.List.FieldSelector != "" {
			if sel, err := fields.ParseSelector(r.List.FieldSelector); err == nil {
				a.FieldSelector = sel
				if name, ok := sel.RequiresExactMatch("metadata.name"); ok && a.Name == "" {
					a.Name = name
				}
			}
		}
	}
	if r.Kind.GVK.Group == "" && r.Kind.Resource == "namespaces" && r.Name != "" {
		// A namespace counts as inside itself, so that a RoleBinding in it can grant access to it.
		a.Namespace = r.Name
	}
	return a
}

// Forbidden returns the 403 error for a request with the attributes.
func Forbidden(a *Attributes, reason string) *apierrors.StatusError {
	msg := denialText(a)
	if reason != "" {
		msg += ": " + reason
	}
	err := apierrors.NewForbidden(schema.GroupResource{Group: a.APIGroup, Resource: a.Resource}, a.Name,
		errors.New(msg))
	err.ErrStatus.Code = http.StatusForbidden
	return err
}

func denialText(a *Attributes) string {
	if a.Resource == "" {
		return fmt.Sprintf("User %q cannot %s path %q", a.User.Name, a.Verb, a.Path)
	}
	resource := a.Resource
	if a.Subresource != "" {
		resource += "/" + a.Subresource
	}
	where := "at the cluster scope"
	if a.Namespace != "" {
		where = fmt.Sprintf("in the namespace %q", a.Namespace)
	}
	return fmt.Sprintf("User %q cannot %s resource %q in API group %q %s", a.User.Name, a.Verb, resource,
		a.APIGroup, where)
}
