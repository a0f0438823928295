// Package flowcontrol describes the kinds of the API group flowcontrol.apiserver.k8s.io.
package flowcontrol

import (
	"fmt"
	"slices"
	"strings"
	"time"

	flowcontrolv1 "k8s.io/api/flowcontrol/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

const defaultPrecedence = 1000

// FlowSchemaKind returns the definition of the kind FlowSchema.
func FlowSchemaKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: flowcontrolv1.SchemeGroupVersion, Kind: "FlowSchema", Plural: "flowschemas",
		Singular: "flowschema", ClusterScoped: true,
	}, func(l *flowcontrolv1.FlowSchemaList) *[]flowcontrolv1.FlowSchema { return &l.Items })
	k.Writes.Default = builder.Default(func(f *flowcontrolv1.FlowSchema) {
		builder.SetDefault(&f.Spec.MatchingPrecedence,
			defaultPrecedence)
	})
	builder.SeparateStatus(k, func(o *flowcontrolv1.FlowSchema) *flowcontrolv1.FlowSchemaStatus { return &o.Status },
		builder.Accessors[*flowcontrolv1.FlowSchema]{
			Spec:     func(f *flowcontrolv1.FlowSchema) any { return f.Spec },
			CopySpec: func(obj, old *flowcontrolv1.FlowSchema) { obj.Spec = *old.Spec.DeepCopy() },
			Status: func(obj, old *flowcontrolv1.FlowSchema) {
				obj.Status = flowcontrolv1.FlowSchemaStatus{}
				if old != nil {
					obj.Status = *old.Status.DeepCopy()
				}
			},
		})
	builder.AddValidation(k, func(f *flowcontrolv1.FlowSchema) field.ErrorList {
		spec := field.NewPath("spec")
		errs := validateFlowSchema(f.Name, &f.Spec, spec)
		if fixed := MandatoryFlowSchema(f.Name); fixed != nil && !fieldrules.SemanticEqual(f.Spec, *fixed) {
			errs = append(errs, field.Invalid(spec, f.Spec,
				fmt.Sprintf("spec of '%s' must equal the fixed value", f.Name)))
		}
		return errs
	})
	builder.AddStatusValidation(k, func(obj, _ *flowcontrolv1.FlowSchema) field.ErrorList {
		types := make([]string, len(obj.Status.Conditions))
		for i, c := range obj.Status.Conditions {
			types[i] = string(c.Type)
		}
		return validateFlowConditions(types)
	})
	k.Lists.Columns = builder.Columns(builder.NameColumn, builder.StringColumn("PriorityLevel"),
		builder.StringColumn("MatchingPrecedence"), builder.StringColumn("DistinguisherMethod"), builder.AgeColumn,
		builder.StringColumn("MissingPL"))
	k.Lists.Row = builder.Row(func(f *flowcontrolv1.FlowSchema, now time.Time) []any {
		distinguisher, missing := builder.None, "?"
		if d := f.Spec.DistinguisherMethod; d != nil {
			distinguisher = string(d.Type)
		}
		for _, c := range f.Status.Conditions {
			if c.Type == flowcontrolv1.FlowSchemaConditionDangling {
				missing = string(c.Status)
				break
			}
		}
		return []any{f.Name, f.Spec.PriorityLevelConfiguration.Name, int64(f.Spec.MatchingPrecedence), distinguisher,
			builder.Age(f, now), missing}
	})
	return k
}

// MandatoryFlowSchema returns the required spec of a FlowSchema that every cluster must have. It
// returns nil for the names of other FlowSchemas.
func MandatoryFlowSchema(name string) *flowcontrolv1.FlowSchemaSpec {
	groups := func(names ...string) []flowcontrolv1.Subject {
		var out []flowcontrolv1.Subject
		for _, n := range names {
			out = append(out, flowcontrolv1.Subject{Kind: flowcontrolv1.SubjectKindGroup,
				Group: &flowcontrolv1.GroupSubject{Name: n}})
		}
		return out
	}
	everything := func(subjects []flowcontrolv1.Subject) []flowcontrolv1.PolicyRulesWithSubjects {
		all := []string{"*"}
		return []flowcontrolv1.PolicyRulesWithSubjects{{
			Subjects: subjects,
			ResourceRules: []flowcontrolv1.ResourcePolicyRule{{Verbs: all, APIGroups: all, Resources: all,
				ClusterScope: true, Namespaces: all}},
			NonResourceRules: []flowcontrolv1.NonResourcePolicyRule{{Verbs: all, NonResourceURLs: all}},
		}}
	}
	level := func(name string) flowcontrolv1.PriorityLevelConfigurationReference {
		return flowcontrolv1.PriorityLevelConfigurationReference{Name: name}
	}
	switch name {
	case flowcontrolv1.FlowSchemaNameExempt:
		return &flowcontrolv1.FlowSchemaSpec{PriorityLevelConfiguration: level(
			flowcontrolv1.PriorityLevelConfigurationNameExempt),
			MatchingPrecedence: 1, Rules: everything(groups(api.GroupMasters))}
	case flowcontrolv1.FlowSchemaNameCatchAll:
		return &flowcontrolv1.FlowSchemaSpec{PriorityLevelConfiguration: level(
			flowcontrolv1.PriorityLevelConfigurationNameCatchAll),
			MatchingPrecedence: flowcontrolv1.FlowSchemaMaxMatchingPrecedence,
			DistinguisherMethod: &flowcontrolv1.FlowDistinguisherMethod{
				Type: flowcontrolv1.FlowDistinguisherMethodByUserType},
			Rules: everything(groups("system:unauthenticated", api.GroupAuthenticated))}
	}
	return nil
}

func validateFlowSchema(name string, s *flowcontrolv1.FlowSchemaSpec, spec *field.Path) field.ErrorList {
	var errs field.ErrorList
	fldPath, p := spec.Child("matchingPrecedence"), s.MatchingPrecedence
	switch {
	case p <= 0:
		errs = append(errs, field.Invalid(fldPath, p, "must be a positive value"))
	case p > flowcontrolv1.FlowSchemaMaxMatchingPrecedence:
		errs = append(errs, field.Invalid(fldPath, p,
			fmt.Sprintf("must not be greater than %v", flowcontrolv1.FlowSchemaMaxMatchingPrecedence)))
	case p == 1 && name != flowcontrolv1.FlowSchemaNameExempt:
		errs = append(errs, field.Invalid(fldPath, p, "only the schema named 'exempt' may have matchingPrecedence 1"))
	}
	if d := s.DistinguisherMethod; d != nil {
		errs = append(errs, fieldrules.ValidateSupported(d.Type, spec.Child("distinguisherMethod", "type"),
			flowcontrolv1.FlowDistinguisherMethodByNamespaceType, flowcontrolv1.FlowDistinguisherMethodByUserType)...)
	}
	level := spec.Child("priorityLevelConfiguration", "name")
	if n := s.PriorityLevelConfiguration.Name; n == "" {
		errs = append(errs, field.Required(level, "must reference a priority level"))
	} else {
		errs = append(errs, fieldrules.InvalidErrors(level, n, apivalidation.NameIsDNSSubdomain(n, false))...)
	}
	for i := range s.Rules {
		errs = append(errs, validateFlowRule(&s.Rules[i], spec.Child("rules").Index(i))...)
	}
	return errs
}

func validateFlowRule(r *flowcontrolv1.PolicyRulesWithSubjects, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	if len(r.Subjects) == 0 {
		errs = append(errs, field.Required(fldPath.Child("subjects"), "subjects must contain at least one value"))
	}
	for i := range r.Subjects {
		errs = append(errs, validateFlowSubject(&r.Subjects[i], fldPath.Child("subjects").Index(i))...)
	}
	if len(r.ResourceRules) == 0 && len(r.NonResourceRules) == 0 {
		errs = append(errs, field.Required(fldPath,
			"at least one of resourceRules and nonResourceRules has to be non-empty"))
	}
	for i := range r.ResourceRules {
		errs = append(errs, validateFlowResources(&r.ResourceRules[i], fldPath.Child("resourceRules").Index(i))...)
	}
	for i, n := range r.NonResourceRules {
		here := fldPath.Child("nonResourceRules").Index(i)
		errs = append(errs, validateFlowVerbs(n.Verbs, here.Child("verbs"))...)
		urls := here.Child("nonResourceURLs")
		switch {
		case len(n.NonResourceURLs) == 0:
			errs = append(errs, field.Required(urls, "nonResourceURLs must contain at least one value"))
		case slices.Contains(n.NonResourceURLs, "*"):
			if len(n.NonResourceURLs) > 1 {
				errs = append(errs, field.Invalid(urls, n.NonResourceURLs,
					"if '*' is present, must not specify other non-resource URLs"))
			}
		default:
			for j, u := range n.NonResourceURLs {
				if why := whyNoFlowURL(u); why != "" {
					errs = append(errs, field.Invalid(urls.Index(j), u, why))
				}
			}
		}
	}
	return errs
}

func validateFlowSubject(s *flowcontrolv1.Subject, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	missing := func(name, kind string) {
		errs = append(errs, field.Required(fldPath.Child(name),
			fmt.Sprintf("%s is required when subject kind is '%s'", name, kind)))
	}
	named := func(name, at string, path *field.Path) {
		if name == "" {
			errs = append(errs, field.Required(path.Child(at, "name"), ""))
		}
	}
	kinds := []flowcontrolv1.SubjectKind{flowcontrolv1.SubjectKindGroup, flowcontrolv1.SubjectKindServiceAccount,
		flowcontrolv1.SubjectKindUser}
	if wrong := fieldrules.ValidateSupported(s.Kind, fldPath.Child("kind"), kinds...); len(wrong) > 0 {
		return wrong
	}
	switch {
	case s.Kind == flowcontrolv1.SubjectKindServiceAccount && s.ServiceAccount == nil:
		missing("serviceAccount", "ServiceAccount")
	case s.Kind == flowcontrolv1.SubjectKindServiceAccount:
		errs = append(errs, validateFlowAccount(s.ServiceAccount, fldPath.Child("serviceAccount"))...)
	case s.Kind == flowcontrolv1.SubjectKindUser && s.User == nil:
		missing("user", "User")
	case s.Kind == flowcontrolv1.SubjectKindUser:
		named(s.User.Name, "user", fldPath)
	case s.Group == nil:
		missing("group", "Group")
	default:
		named(s.Group.Name, "group", fldPath)
	}
	for _, other := range []struct {
		name string
		kind flowcontrolv1.SubjectKind
		set  bool
	}{{"serviceAccount", "ServiceAccount", s.ServiceAccount != nil}, {"user", "User", s.User != nil},
		{"group", "Group", s.Group != nil}} {
		if other.set && s.Kind != other.kind {
			errs = append(errs, field.Forbidden(fldPath.Child(other.name),
				fmt.Sprintf("%s is forbidden when subject kind is not '%s'", other.name, other.kind)))
		}
	}
	return errs
}

func validateFlowAccount(a *flowcontrolv1.ServiceAccountSubject, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	if a.Name == "" {
		errs = append(errs, field.Required(fldPath.Child("name"), ""))
	} else if a.Name != flowcontrolv1.NameAll {
		errs = append(errs, fieldrules.InvalidErrors(fldPath.Child("name"), a.Name,
			apivalidation.ValidateServiceAccountName(a.Name, false))...)
	}
	if a.Namespace == "" {
		return append(errs, field.Required(fldPath.Child("namespace"), "must specify namespace for service account"))
	}
	return append(errs, fieldrules.InvalidErrors(fldPath.Child("namespace"), a.Namespace,
		apivalidation.ValidateNamespaceName(a.Namespace, false))...)
}

func validateFlowResources(r *flowcontrolv1.ResourcePolicyRule, fldPath *field.Path) field.ErrorList {
	errs := validateFlowVerbs(r.Verbs, fldPath.Child("verbs"))
	list := func(values []string, name, one, others string) {
		switch here := fldPath.Child(name); {
		case len(values) == 0:
			errs = append(errs, field.Required(here, "resource rules must supply at least one "+one))
		case len(values) > 1 && slices.Contains(values, "*"):
			errs = append(errs, field.Invalid(here, values, "if '*' is present, must not specify other "+others))
		}
	}
	list(r.APIGroups, "apiGroups", "api group", "api groups")
	list(r.Resources, "resources", "resource", "resources")
	switch here := fldPath.Child("namespaces"); {
	case len(r.Namespaces) == 0 && !r.ClusterScope:
		errs = append(errs, field.Required(here,
			"resource rules that are not cluster scoped must supply at least one namespace"))
	case slices.Contains(r.Namespaces, "*"):
		if len(r.Namespaces) > 1 {
			errs = append(errs, field.Invalid(here, r.Namespaces,
				"if '*' is present, must not specify other namespaces"))
		}
	default:
		for i, n := range r.Namespaces {
			for _, why := range apivalidation.ValidateNamespaceName(n, false) {
				errs = append(errs, field.Invalid(here.Index(i), n,
					"each member of this list must be '*' or a DNS-1123 label; "+why))
			}
		}
	}
	return errs
}

var flowVerbs = []string{"create", "delete", "deletecollection", "get", "list", "patch", "proxy", "update", "watch"}

func validateFlowVerbs(verbs []string, fldPath *field.Path) field.ErrorList {
	switch {
	case len(verbs) == 0:
		return field.ErrorList{field.Required(fldPath, "verbs must contain at least one value")}
	case slices.Contains(verbs, "*"):
		if len(verbs) > 1 {
			return field.ErrorList{field.Invalid(fldPath, verbs, "if '*' is present, must not specify other verbs")}
		}
	case slices.ContainsFunc(verbs, func(v string) bool { return !slices.Contains(flowVerbs, v) }):
		return field.ErrorList{field.NotSupported(fldPath, verbs, flowVerbs)}
	}
	return nil
}

// whyNoFlowURL returns the error in a non-resource URL of a FlowSchema. It returns "" if the URL is
// valid. A "*" is allowed only at the end.
func whyNoFlowURL(path string) string {
	switch {
	case path == "":
		return "must not be empty"
	case path == "/":
	case !strings.HasPrefix(path, "/"):
		return "must start with slash"
	case strings.Contains(path, " "):
		return "must not contain white-space"
	case strings.Contains(path, "//"):
		return "must not contain double slash"
	case strings.Contains(strings.TrimSuffix(path, "/*"), "*"):
		return "wildcard can only do suffix matching"
	}
	return ""
}

func validateFlowConditions(types []string) field.ErrorList {
	var errs field.ErrorList
	for i, t := range types {
		fldPath := field.NewPath("status", "conditions").Index(i).Child("type")
		if slices.Contains(types[:i], t) {
			errs = append(errs, field.Duplicate(fldPath, t))
		}
		if t == "" {
			errs = append(errs, field.Required(fldPath, "must not be empty"))
		}
	}
	return errs
}
