package admissionregistration

import (
	"fmt"
	"net/url"
	"strings"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api/kinds/expressions"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// maxMatchConditions is the maximum number of match conditions of a webhook or a policy.
const maxMatchConditions = 64

func validateWebhooks(hooks []admissionv1.MutatingWebhook, o *expressions.Options) field.ErrorList {
	var errs field.ErrorList
	var texts expressions.Collector
	seen := map[string]bool{}
	for i := range hooks {
		w, fldPath := &hooks[i], field.NewPath("webhooks").Index(i)
		errs = append(errs, validateWebhook(w, fldPath, &texts)...)
		errs = append(errs, validateReviewVersions(w.AdmissionReviewVersions,
			fldPath.Child("admissionReviewVersions"))...)
		if w.Name != "" && seen[w.Name] {
			errs = append(errs, field.Duplicate(fldPath.Child("name"), w.Name))
		}
		seen[w.Name] = true
	}
	return append(errs, o.CompileAll(&texts)...)
}

func validateWebhook(
	w *admissionv1.MutatingWebhook, fldPath *field.Path, texts *expressions.Collector,
) field.ErrorList {
	errs := validation.IsFullyQualifiedName(fldPath.Child("name"), w.Name)
	for i := range w.Rules {
		errs = append(errs, validateRule(&w.Rules[i], fldPath.Child("rules").Index(i))...)
	}
	if p := w.FailurePolicy; p != nil {
		errs = append(errs, fieldrules.ValidateSupported(*p, fldPath.Child("failurePolicy"), admissionv1.Fail,
			admissionv1.Ignore)...)
	}
	if p := w.MatchPolicy; p != nil {
		errs = append(errs, fieldrules.ValidateSupported(*p, fldPath.Child("matchPolicy"), admissionv1.Equivalent,
			admissionv1.Exact)...)
	}
	if e := w.SideEffects; e == nil {
		errs = append(errs, field.Required(fldPath.Child("sideEffects"), "must specify one of None, NoneOnDryRun"))
	} else {
		errs = append(errs, fieldrules.ValidateSupported(*e, fldPath.Child("sideEffects"),
			admissionv1.SideEffectClassNone,
			admissionv1.SideEffectClassNoneOnDryRun)...)
	}
	if s := w.TimeoutSeconds; s != nil && (*s < 1 || *s > 30) {
		errs = append(errs, field.Invalid(fldPath.Child("timeoutSeconds"), *s,
			"the timeout value must be between 1 and 30 seconds"))
	}
	if w.NamespaceSelector != nil {
		errs = append(errs, fieldrules.ValidateSelector(w.NamespaceSelector, fldPath.Child("namespaceSelector"))...)
	}
	if w.ObjectSelector != nil {
		errs = append(errs, fieldrules.ValidateSelector(w.ObjectSelector, fldPath.Child("objectSelector"))...)
	}
	if p := w.ReinvocationPolicy; p != nil {
		errs = append(errs, fieldrules.ValidateSupported(*p, fldPath.Child("reinvocationPolicy"),
			admissionv1.IfNeededReinvocationPolicy, admissionv1.NeverReinvocationPolicy)...)
	}
	switch cc, here := &w.ClientConfig, fldPath.Child("clientConfig"); {
	case (cc.URL == nil) == (cc.Service == nil):
		errs = append(errs, field.Required(here, "exactly one of url or service is required"))
	case cc.URL != nil:
		errs = append(errs, validateWebhookURL(*cc.URL, here.Child("url"))...)
	default:
		errs = append(errs, validateWebhookService(cc.Service, here.Child("service"))...)
	}
	return append(errs, validateMatchConditions(w.MatchConditions, fldPath.Child("matchConditions"), texts)...)
}

func validateWebhookURL(text string, fldPath *field.Path) field.ErrorList {
	const form = "; desired format: https://host[/path]"
	u, err := url.Parse(text)
	if err != nil {
		return field.ErrorList{field.Required(fldPath, "url must be a valid URL: "+err.Error()+form)}
	}
	var errs field.ErrorList
	if u.Scheme != "https" {
		errs = append(errs, field.Invalid(fldPath, u.Scheme, "'https' is the only allowed URL scheme"+form))
	}
	if u.Host == "" {
		errs = append(errs, field.Invalid(fldPath, u.Host, "host must be specified"+form))
	}
	if u.User != nil {
		errs = append(errs, field.Invalid(fldPath, u.User.String(), "user information is not permitted in the URL"))
	}
	if u.Fragment != "" {
		errs = append(errs, field.Invalid(fldPath, u.Fragment, "fragments are not permitted in the URL"))
	}
	if u.RawQuery != "" {
		errs = append(errs, field.Invalid(fldPath, u.RawQuery, "query parameters are not permitted in the URL"))
	}
	return errs
}

func validateWebhookService(s *admissionv1.ServiceReference, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	if s.Name == "" {
		errs = append(errs, field.Required(fldPath.Child("name"), ""))
	}
	if s.Namespace == "" {
		errs = append(errs, field.Required(fldPath.Child("namespace"), ""))
	}
	if port := ptr.Deref(s.Port, 0); s.Port != nil {
		if wrong := validation.IsValidPortNum(int(port)); len(wrong) > 0 {
			errs = append(errs, field.Invalid(fldPath.Child("port"), port,
				"port is not valid: "+strings.Join(wrong, ", ")))
		}
	}
	path, here := ptr.Deref(s.Path, ""), fldPath.Child("path")
	switch path {
	case "", "/":
		return errs
	case "//":
		return append(errs, field.Invalid(here, path, "segment[0] may not be empty"))
	}
	if !strings.HasPrefix(path, "/") {
		errs = append(errs, field.Invalid(here, path, "must start with a '/'"))
	}
	for i, step := range strings.Split(strings.TrimSuffix(path[1:], "/"), "/") {
		if step == "" {
			errs = append(errs, field.Invalid(here, path, fmt.Sprintf("segment[%d] may not be empty", i)))
			continue
		}
		for _, why := range validation.IsDNS1123Subdomain(step) {
			errs = append(errs, field.Invalid(here, path, fmt.Sprintf("segment[%d]: %v", i, why)))
		}
	}
	return errs
}

func validateReviewVersions(versions []string, fldPath *field.Path) field.ErrorList {
	if len(versions) == 0 {
		return field.ErrorList{field.Required(fldPath, "must specify one of v1, v1beta1")}
	}
	var errs field.ErrorList
	seen := map[string]bool{}
	for i, v := range versions {
		if seen[v] {
			errs = append(errs, field.Invalid(fldPath.Index(i), v, "duplicate version"))
			continue
		}
		seen[v] = true
		errs = append(errs, fieldrules.InvalidErrors(fldPath.Index(i), v, validation.IsDNS1035Label(v))...)
	}
	if !seen["v1"] && !seen["v1beta1"] {
		errs = append(errs, field.Invalid(fldPath, versions, "must include at least one of v1, v1beta1"))
	}
	return errs
}

// validateMatchConditions validates the match conditions of a webhook or a policy. It adds their
// CEL expressions to texts, which the caller compiles.
func validateMatchConditions(list []admissionv1.MatchCondition, fldPath *field.Path,
	texts *expressions.Collector) field.ErrorList {
	var errs field.ErrorList
	if len(list) > maxMatchConditions {
		return field.ErrorList{field.TooMany(fldPath, len(list), maxMatchConditions)}
	}
	seen := map[string]bool{}
	for i, c := range list {
		here := fldPath.Index(i)
		if text := strings.TrimSpace(c.Expression); text == "" {
			errs = append(errs, field.Required(here.Child("expression"), ""))
		} else {
			texts.Add(expressions.MatchCondition, text, here.Child("expression"))
		}
		switch {
		case c.Name == "":
			errs = append(errs, field.Required(here.Child("name"), ""))
		case seen[c.Name]:
			errs = append(errs, field.Duplicate(here.Child("name"), c.Name))
		default:
			errs = append(errs, fieldrules.InvalidErrors(here.Child("name"), c.Name,
				validation.IsQualifiedName(c.Name))...)
		}
		seen[c.Name] = true
	}
	return errs
}
