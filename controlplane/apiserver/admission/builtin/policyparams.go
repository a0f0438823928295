package builtin

import (
	"context"
	"fmt"
	"slices"

	arv1 "k8s.io/api/admissionregistration/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/admission"
)

// policyParams returns a plugin for admission policies and their bindings. It requires that the
// user may read the parameter objects that the policy or binding references. The server reads them
// with its own permissions, and expressions can copy their content into messages and objects that
// other users see.
func policyParams(c Config) func(ctx context.Context, a *admission.Attempt) error {
	return func(ctx context.Context, a *admission.Attempt) error {
		if a.Kind.GVK.Group != arv1.GroupName || !a.CreatesObject() && !a.UpdatesObject() {
			return nil
		}
		asked, before := paramsNamed(a.Whole), paramsNamed(a.Stored)
		if slices.Contains(a.User.Groups, api.GroupMasters) || asked.equalTo(&before) {
			return nil
		}
		var why error
		at := field.NewPath("spec")
		switch {
		case asked.kind != nil:
			at, why = at.Child("paramKind"), c.readsParamKind(ctx, a, asked.kind)
		case asked.ref != nil:
			at, why = at.Child("paramRef"), c.readsParamRef(ctx, a, &asked)
		}
		if why == nil {
			return nil
		}
		errs := field.ErrorList{field.Forbidden(at, why.Error())}
		return apierrors.NewInvalid(a.Kind.GVK.GroupKind(), a.Whole.GetName(), errs)
	}
}

// namedParams contains the parameter references of a policy or binding.
type namedParams struct {
	kind *arv1.ParamKind // of a policy
	ref  *arv1.ParamRef  // of a binding
	// policies is the resource of the policy that a binding with a ref binds, and policy is its
	// name.
	policies, policy string
}

func (p *namedParams) equalTo(q *namedParams) bool {
	return p.policy == q.policy && equality.Semantic.DeepEqual(p.kind, q.kind) &&
		equality.Semantic.DeepEqual(p.ref, q.ref)
}

func paramsNamed(o api.Object) namedParams {
	bound := func(ref *arv1.ParamRef, policies, policy string) namedParams {
		if ref == nil {
			return namedParams{}
		}
		return namedParams{ref: ref, policies: policies, policy: policy}
	}
	switch o := o.(type) {
	case *arv1.ValidatingAdmissionPolicy:
		return namedParams{kind: o.Spec.ParamKind}
	case *arv1.MutatingAdmissionPolicy:
		return namedParams{kind: o.Spec.ParamKind}
	case *arv1.ValidatingAdmissionPolicyBinding:
		return bound(o.Spec.ParamRef, "validatingadmissionpolicies", o.Spec.PolicyName)
	case *arv1.MutatingAdmissionPolicyBinding:
		return bound(o.Spec.ParamRef, "mutatingadmissionpolicies", o.Spec.PolicyName)
	}
	return namedParams{}
}

// readsParamKind returns an error unless the user may read all objects of a policy's parameter
// kind, because a binding may select any of them.
func (c Config) readsParamKind(ctx context.Context, a *admission.Attempt, kind *arv1.ParamKind) error {
	gvr, _ := c.paramResource(kind)
	if ok, _ := c.Access.Allowed(ctx, a.User, "get", gvr, "", "*", "*"); ok {
		return nil
	}
	return fmt.Errorf("user %q must have \"get\" permission on all objects of the referenced paramKind "+
		"(kind=%s, apiVersion=%s)", a.User.Name, kind.Kind, kind.APIVersion)
}

// readsParamRef returns an error unless the user may read the parameter objects that a binding
// selects. If the reference has no namespace, the user needs the permission in all namespaces. If
// the policy does not exist, the user needs the permission on all resources.
func (c Config) readsParamRef(ctx context.Context, a *admission.Attempt, params *namedParams) error {
	verb := "get"
	if params.ref.Name == "" {
		verb = "list"
	}
	gvr, unknown := anyResource, fmt.Sprintf("unable to get policy %s", params.policy)
	if policy, ok := c.Cluster.Get(ctx, params.policies, "", params.policy); ok {
		gvr, unknown = c.paramResource(paramsNamed(policy).kind)
	}
	if ok, _ := c.Access.Allowed(ctx, a.User, verb, gvr, "", params.ref.Namespace, params.ref.Name); ok {
		return nil
	}
	if unknown != "" {
		return fmt.Errorf("%s to determine minimum required permissions and user %q does not have %q permission "+
			"for all groups, versions and resources", unknown, a.User.Name, verb)
	}
	return fmt.Errorf("user %q does not have %q permission on the object referenced by paramRef", a.User.Name, verb)
}

var anyResource = schema.GroupVersionResource{Group: "*", Version: "*", Resource: "*"}

// paramResource returns the resource of a parameter kind. If the kind cannot be resolved, it
// returns a resource with wildcards, and unknown is the reason.
func (c Config) paramResource(kind *arv1.ParamKind) (gvr schema.GroupVersionResource, unknown string) {
	if kind == nil {
		return anyResource, ""
	}
	gv, err := schema.ParseGroupVersion(kind.APIVersion)
	if err != nil {
		return anyResource, fmt.Sprintf("unable to parse paramKind %s %s", kind.APIVersion, kind.Kind)
	}
	if k := c.Kinds.ByGVK(gv.WithKind(kind.Kind)); k != nil {
		return k.GVR(), ""
	}
	return gv.WithResource("*"), fmt.Sprintf("unable to resolve paramKind %s %s", kind.APIVersion, kind.Kind)
}
