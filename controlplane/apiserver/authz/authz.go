// Package authz is stage 2 of the pipeline: may this user do this to that?
// Authorizers are asked in order; the first that allows or denies decides, and
// what none allows is refused. RBAC and node rules live in memory, kept current
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

// Attributes are what a decision rests on: a resource and what is done to it, or a bare path.
type Attributes struct {
	User        api.User
	Verb        string
	Namespace   string
	APIGroup    string
	APIVersion  string
	Resource    string // "" = a path
	Subresource string
	Name        string
	Path        string
	// FieldSelector narrows a list or watch; nil = everything.
	FieldSelector fields.Selector
	// LabelSelector narrows it as well, in its written form; "" = everything.
	LabelSelector string
	// WantReason asks for the words of an allow too.
	WantReason bool
}

// Decision is an authorizer's answer.
type Decision int

// NoOpinion leaves the question to the next authorizer.
const (
	NoOpinion Decision = iota
	Allow
	Deny
)

// Authorizer decides. The reason is for humans and may be empty.
type Authorizer interface {
	Authorize(ctx context.Context, a *Attributes) (Decision, string)
}

// Union asks authorizers in order.
type Union []Authorizer

// Authorize is Authorizer; the reasons of those without opinion are joined.
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

// Privileged allows everything to the administrators' group, and to nobody by
// name: a name can be borrowed by who may impersonate users. The parts of this
// process that need every right carry the group.
type Privileged struct{}

// Authorize is Authorizer.
func (Privileged) Authorize(_ context.Context, a *Attributes) (Decision, string) {
	for _, g := range a.User.Groups {
		if g == api.GroupMasters {
			return Allow, ""
		}
	}
	return NoOpinion, ""
}

// Of reads the attributes of a request on a resource.
func Of(r *api.Request) *Attributes {
	a := &Attributes{
		User: r.User, Verb: string(r.Verb), Namespace: r.Namespace,
		APIGroup: r.Kind.GVK.Group, APIVersion: r.Kind.GVK.Version,
		Resource: r.Kind.Resource, Subresource: r.Subresource, Name: r.Name,
	}
	switch r.Verb {
	case api.VerbConnect:
		// Reading a log is reading; a way into a container is more than that, by whatever HTTP method it is asked for.
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
		// A namespace lies in itself, so that a RoleBinding inside can grant it.
		a.Namespace = r.Name
	}
	return a
}

// Forbidden is the refusal of what a asks for.
func Forbidden(a *Attributes, reason string) *apierrors.StatusError {
	msg := cannot(a)
	if reason != "" {
		msg += ": " + reason
	}
	err := apierrors.NewForbidden(schema.GroupResource{Group: a.APIGroup, Resource: a.Resource}, a.Name, errors.New(msg))
	err.ErrStatus.Code = http.StatusForbidden
	return err
}

func cannot(a *Attributes) string {
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
	return fmt.Sprintf("User %q cannot %s resource %q in API group %q %s", a.User.Name, a.Verb, resource, a.APIGroup, where)
}
