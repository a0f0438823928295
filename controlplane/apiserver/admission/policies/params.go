package policies

import (
	"context"
	"errors"
	"fmt"

	arv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
)

// maxParams is the maximum number of parameter objects that a binding may select. The policy is
// evaluated once for each.
const maxParams = 1000

// findParams returns the parameter objects with which a binding evaluates the policy. A list of one
// nil object means one evaluation without a parameter.
func (p *Policies) findParams(ctx context.Context, admissionPolicy *policy, b *binding, namespace string) (
	[]api.Object, error,
) {
	ref := b.param
	if admissionPolicy.param == nil || ref == nil {
		return []api.Object{nil}, nil
	}
	gv, err := schema.ParseGroupVersion(admissionPolicy.param.APIVersion)
	if err != nil {
		return nil, err
	}
	k := p.cfg.Versions.Kinds.ByGVK(gv.WithKind(admissionPolicy.param.Kind))
	if k == nil || k.Serving.Virtual {
		return nil, fmt.Errorf("paramKind kind `%v` not known", admissionPolicy.param.String())
	}
	if namespace, err = paramNamespace(k, ref, namespace); err != nil {
		return nil, err
	}
	found, err := p.readParams(ctx, k, ref, namespace)
	if err != nil {
		return nil, err
	}
	if len(found) == 0 && ref.ParameterNotFoundAction != nil && *ref.ParameterNotFoundAction == arv1.DenyAction {
		return nil, errors.New("no params found for policy binding with `Deny` parameterNotFoundAction")
	}
	return found, nil
}

func paramNamespace(k *api.Kind, ref *arv1.ParamRef, namespace string) (string, error) {
	switch {
	case !k.Namespaced && ref.Namespace != "":
		return "", errors.New("paramRef.namespace must not be provided for a cluster-scoped `paramKind`")
	case !k.Namespaced:
		return "", nil
	case ref.Namespace != "":
		return ref.Namespace, nil
	case namespace == "":
		return "", errors.New("cannot use namespaced paramRef in policy binding that matches cluster-scoped resources")
	}
	return namespace, nil
}

func (p *Policies) readParams(ctx context.Context, k *api.Kind, ref *arv1.ParamRef, namespace string) (
	[]api.Object, error,
) {
	switch {
	case ref.Name != "" && ref.Selector != nil:
		return nil, errors.New("paramRef.name and paramRef.selector are mutually exclusive")
	case ref.Name != "":
		o, err := p.cfg.Params.GetObject(ctx, k, namespace, ref.Name)
		if err != nil || o == nil {
			return nil, err
		}
		return []api.Object{o}, nil
	case ref.Selector != nil:
		s, err := metav1.LabelSelectorAsSelector(ref.Selector)
		if err != nil {
			return nil, err
		}
		found, err := p.cfg.Params.ListObjects(ctx, k, namespace, s)
		if err == nil && len(found) > maxParams {
			err = fmt.Errorf("paramRef.selector selects %d objects, at most %d are used", len(found), maxParams)
		}
		return found, err
	}
	return nil, errors.New("one of name or selector must be provided")
}
