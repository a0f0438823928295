package policies

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"

	arv1 "k8s.io/api/admissionregistration/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/intstr"
	apiservercel "k8s.io/apiserver/pkg/cel"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/custom"
	"keelson.dev/keelson/controlplane/apiserver/admission/matching"
	"keelson.dev/keelson/controlplane/apiserver/cel"
)

// maxTypes is the maximum number of kinds for which the expressions of a policy are type-checked.
const maxTypes = 10

// CheckTypes returns the type errors of a policy's expressions, for the kinds that its rules list
// without wildcards. They are warnings and do not affect the evaluation of the policy.
func CheckTypes(
	admissionPolicy *arv1.ValidatingAdmissionPolicy, kinds *api.Kinds, compiler *cel.Admission,
) []arv1.ExpressionWarning {
	of := namedKinds(admissionPolicy, kinds)
	types := make([]*apiservercel.DeclType, len(of))
	for i, k := range of {
		types[i] = typeOf(k)
	}
	params := typeOf(paramKind(admissionPolicy, kinds))
	d := cel.Declared{Params: admissionPolicy.Spec.ParamKind != nil, Authorizer: true}
	check := func(field, text string) (out []arv1.ExpressionWarning) {
		var found []string
		for i, k := range of {
			t := types[i]
			if t == nil || text == "" {
				continue
			}
			said, err := compiler.Check(text, d, celVariables(admissionPolicy.Spec.Variables), t, params)
			if err != nil {
				said = "type checking error: " + err.Error()
			}
			if said != "" {
				found = append(found, fmt.Sprintf("%v: %s\n", k.GVK, said))
			}
		}
		if len(found) > 0 {
			out = append(out, arv1.ExpressionWarning{FieldRef: field, Warning: strings.Join(found, "\n")})
		}
		return out
	}
	var all []arv1.ExpressionWarning
	for i, v := range admissionPolicy.Spec.Validations {
		all = append(all, check(fmt.Sprintf("spec.validations[%d].expression", i), v.Expression)...)
		all = append(all, check(fmt.Sprintf("spec.validations[%d].messageExpression", i), v.MessageExpression)...)
	}
	return all
}

// Types returns the kinds for which CheckTypes checks a policy, including the parameter kind. The
// warnings of CheckTypes are valid as long as these kinds are served unchanged. hasCustom reports
// whether some of the kinds are custom resources or unknown.
func Types(admissionPolicy *arv1.ValidatingAdmissionPolicy, kinds *api.Kinds) (all []*api.Kind, hasCustom bool) {
	all = namedKinds(admissionPolicy, kinds)
	c := matching.OfPolicy(admissionPolicy.Spec.MatchConstraints)
	hasCustom = len(all) < len(c.ExplicitResources())
	if admissionPolicy.Spec.ParamKind != nil {
		k := paramKind(admissionPolicy, kinds)
		all = append(all, k)
		hasCustom = hasCustom || k == nil
	}
	return all, hasCustom || slices.ContainsFunc(all, func(k *api.Kind) bool {
		return k != nil &&
			k.Serving.Definition != ""
	})
}

// namedKinds returns the kinds that the rules of a policy list without wildcards, sorted, at most
// maxTypes.
func namedKinds(admissionPolicy *arv1.ValidatingAdmissionPolicy, kinds *api.Kinds) (of []*api.Kind) {
	c := matching.OfPolicy(admissionPolicy.Spec.MatchConstraints)
	for _, gvr := range c.ExplicitResources() {
		if k := kinds.ByResource(gvr); k != nil && !slices.Contains(of, k) && len(of) < maxTypes {
			of = append(of, k)
		}
	}
	slices.SortFunc(of, func(a, b *api.Kind) int { return strings.Compare(a.GVK.String(), b.GVK.String()) })
	return of
}

// paramKind returns the kind of a policy's parameters; nil if the policy has none or the kind is
// unknown.
func paramKind(admissionPolicy *arv1.ValidatingAdmissionPolicy, kinds *api.Kinds) *api.Kind {
	if admissionPolicy.Spec.ParamKind == nil {
		return nil
	}
	gv, err := schema.ParseGroupVersion(admissionPolicy.Spec.ParamKind.APIVersion)
	if err != nil {
		return nil
	}
	return kinds.ByGVK(gv.WithKind(admissionPolicy.Spec.ParamKind.Kind))
}

// Declarer is a custom.Shape that knows the CEL type of its objects. Declared returns nil if there
// is no schema. The metadata in the type has only the name fields. The caller may modify the
// result.
type Declarer interface {
	Declared() *apiservercel.DeclType
}

// typeOf returns the CEL type of a kind's objects; nil if it is unknown.
func typeOf(k *api.Kind) *apiservercel.DeclType {
	if k == nil {
		return nil
	}
	if o, is := k.Type.New().(*custom.Object); is {
		d, ok := o.Shape.(Declarer)
		if !ok {
			return nil
		}
		t := d.Declared()
		if t != nil {
			const meta = "metadata"
			t.Fields[meta] = apiservercel.NewDeclField(meta,
				declareType(reflect.TypeFor[metav1.ObjectMeta](), k.GVK.Kind+"."+meta, nil), false, nil, nil)
		}
		return t
	}
	return declareType(reflect.TypeOf(k.Type.New()).Elem(), k.GVK.Kind, nil)
}

// leaves maps Go types with their own JSON encoding, such as metav1.Time, to CEL types.
var leaves = map[reflect.Type]*apiservercel.DeclType{
	reflect.TypeFor[metav1.Time]():          apiservercel.TimestampType,
	reflect.TypeFor[metav1.MicroTime]():     apiservercel.TimestampType,
	reflect.TypeFor[time.Time]():            apiservercel.TimestampType,
	reflect.TypeFor[metav1.Duration]():      apiservercel.StringType,
	reflect.TypeFor[resource.Quantity]():    apiservercel.DynType,
	reflect.TypeFor[intstr.IntOrString]():   apiservercel.DynType,
	reflect.TypeFor[runtime.RawExtension](): apiservercel.DynType,
	reflect.TypeFor[metav1.FieldsV1]():      apiservercel.DynType,
	reflect.TypeFor[[]byte]():               apiservercel.BytesType,
}

// declareType returns the CEL type for a Go type. within are the enclosing struct types; a type
// that contains itself becomes dynamic there.
func declareType(t reflect.Type, name string, within []reflect.Type) *apiservercel.DeclType {
	if leaf := leaves[t]; leaf != nil {
		return leaf
	}
	switch t.Kind() {
	case reflect.Pointer:
		return declareType(t.Elem(), name, within)
	case reflect.String:
		return apiservercel.StringType
	case reflect.Bool:
		return apiservercel.BoolType
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64, reflect.Uint8, reflect.Uint16,
		reflect.Uint32:
		return apiservercel.IntType
	case reflect.Float32, reflect.Float64:
		return apiservercel.DoubleType
	case reflect.Slice:
		return apiservercel.NewListType(declareType(t.Elem(), name+".@idx", within), -1)
	case reflect.Map:
		return apiservercel.NewMapType(apiservercel.StringType, declareType(t.Elem(), name+".@elem", within), -1)
	case reflect.Struct:
		if !slices.Contains(within, t) {
			fields := map[string]*apiservercel.DeclField{}
			addFields(fields, t, name, append(within[:len(within):len(within)], t))
			return apiservercel.NewObjectType(name, fields)
		}
	}
	return apiservercel.DynType
}

func addFields(target map[string]*apiservercel.DeclField, t reflect.Type, name string, within []reflect.Type) {
	for i := range t.NumField() {
		f := t.Field(i)
		key, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		switch {
		case key == "" && f.Anonymous:
			addFields(target, f.Type, name, within)
		case key != "" && key != "-":
			escaped, ok := apiservercel.Escape(key)
			if !ok {
				continue
			}
			target[escaped] = apiservercel.NewDeclField(escaped, declareType(f.Type, name+"."+key, within),
				false, nil, nil)
		}
	}
}
