// Package apiregistration describes the kinds of the API group apiregistration.k8s.io.
package apiregistration

import (
	"fmt"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/custom"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
)

// APIServiceKind returns the definition of the kind APIService, which states whether a group
// version is served by this API server or by a Service.
func APIServiceKind() *api.Kind {
	type service = apiregistrationv1.APIService
	k := builder.New(builder.Names{
		GroupVersion: apiregistrationv1.SchemeGroupVersion, Kind: "APIService", Conditional: true,
		Plural: "apiservices", Singular: "apiservice",
		ClusterScoped: true, Rule: builder.PathSegment,
	}, func(l *apiregistrationv1.APIServiceList) *[]service { return &l.Items })
	k.Naming.Categories = []string{"api-extensions"}
	k.Writes.Default = builder.Default(func(s *service) {
		if s.Spec.Service != nil && s.Spec.Service.Port == nil {
			port := int32(443)
			s.Spec.Service.Port = &port
		}
	})
	builder.SeparateStatus(k, func(s *service) *apiregistrationv1.APIServiceStatus { return &s.Status },
		builder.Accessors[*service]{
			Spec:     func(s *service) any { return s.Spec },
			CopySpec: func(obj, old *service) { obj.Spec = *old.Spec.DeepCopy() },
			Status: func(obj, old *service) {
				obj.Status = apiregistrationv1.APIServiceStatus{}
				switch {
				case old != nil:
					obj.Status = *old.Status.DeepCopy()
				case obj.Spec.Service == nil:
					obj.Status.Conditions = []apiregistrationv1.APIServiceCondition{
						LocalAPIService(obj.CreationTimestamp.Time)}
				}
			},
		})
	builder.OmitGeneration(k)
	builder.KeepMetadataOnStatus(k)
	builder.AddValidation(k, validateAPIService)
	builder.AddStatusValidation(k, func(s, _ *service) (errs field.ErrorList) {
		for i, c := range s.Status.Conditions {
			switch c.Status {
			case apiregistrationv1.ConditionTrue, apiregistrationv1.ConditionFalse, apiregistrationv1.ConditionUnknown:
			default:
				errs = append(errs, field.NotSupported(field.NewPath("status", "conditions").Index(i).Child("status"),
					c.Status,
					[]apiregistrationv1.ConditionStatus{apiregistrationv1.ConditionTrue,
						apiregistrationv1.ConditionFalse, apiregistrationv1.ConditionUnknown}))
			}
		}
		return errs
	})
	k.Schema.Types = custom.APIServiceTypes
	k.Lists.Columns = builder.Columns(builder.NameColumn, builder.StringColumn("Service"),
		builder.StringColumn("Available"),
		builder.AgeColumn)
	k.Lists.Row = builder.Row(func(s *service, now time.Time) []any {
		return []any{s.Name, serviceColumn(s), availableColumn(s), builder.Age(s, now)}
	})
	return k
}

// LocalAPIService returns the condition Available of an APIService for a group version that this
// API server itself serves.
func LocalAPIService(transitionTime time.Time) apiregistrationv1.APIServiceCondition {
	c := apiregistrationv1.APIServiceCondition{
		Type: apiregistrationv1.Available, Status: apiregistrationv1.ConditionTrue,
		Reason: "Local", Message: "Local APIServices are always available",
	}
	c.LastTransitionTime.Time = transitionTime
	return c
}

func serviceColumn(s *apiregistrationv1.APIService) string {
	if s.Spec.Service == nil {
		return "Local"
	}
	return s.Spec.Service.Namespace + "/" + s.Spec.Service.Name
}

func availableColumn(s *apiregistrationv1.APIService) string {
	for _, c := range s.Status.Conditions {
		switch {
		case c.Type != apiregistrationv1.Available:
		case c.Status == apiregistrationv1.ConditionTrue:
			return string(c.Status)
		default:
			return fmt.Sprintf("%s (%s)", c.Status, c.Reason)
		}
	}
	return string(apiregistrationv1.ConditionUnknown)
}

func validateAPIService(s *apiregistrationv1.APIService) (errs field.ErrorList) {
	spec := field.NewPath("spec")
	if want := s.Spec.Version + "." + s.Spec.Group; s.Name != want {
		errs = append(errs, field.Invalid(field.NewPath("metadata", "name"), s.Name,
			fmt.Sprintf("must be `spec.version+\".\"+spec.group`: %q", want)))
	}
	if s.Spec.Group == "" && s.Spec.Version != "v1" {
		errs = append(errs, field.Required(spec.Child("group"),
			"only v1 may have an empty group and it better be legacy kube"))
	}
	if s.Spec.Group != "" {
		for _, msg := range validation.IsDNS1123Subdomain(s.Spec.Group) {
			errs = append(errs, field.Invalid(spec.Child("group"), s.Spec.Group, msg))
		}
	}
	for _, msg := range validation.IsDNS1035Label(s.Spec.Version) {
		errs = append(errs, field.Invalid(spec.Child("version"), s.Spec.Version, msg))
	}
	if n := s.Spec.GroupPriorityMinimum; n <= 0 || n > 20000 {
		errs = append(errs, field.Invalid(spec.Child("groupPriorityMinimum"), n,
			"must be positive and less than 20000"))
	}
	if n := s.Spec.VersionPriority; n <= 0 || n > 1000 {
		errs = append(errs, field.Invalid(spec.Child("versionPriority"), n, "must be positive and less than 1000"))
	}
	if s.Spec.Service == nil {
		return append(errs, validateLocalAPIService(s, spec)...)
	}
	return append(errs, validateRemoteAPIService(s, spec)...)
}

func validateLocalAPIService(s *apiregistrationv1.APIService, spec *field.Path) (errs field.ErrorList) {
	if n := len(s.Spec.CABundle); n != 0 {
		errs = append(errs, field.Invalid(spec.Child("caBundle"), fmt.Sprintf("%d bytes", n),
			"local APIServices may not have a caBundle"))
	}
	if s.Spec.InsecureSkipTLSVerify {
		errs = append(errs, field.Invalid(spec.Child("insecureSkipTLSVerify"), true,
			"local APIServices may not have insecureSkipTLSVerify"))
	}
	return errs
}

func validateRemoteAPIService(s *apiregistrationv1.APIService, spec *field.Path) (errs field.ErrorList) {
	fldPath := spec.Child("service")
	if s.Spec.Service.Namespace == "" {
		errs = append(errs, field.Required(fldPath.Child("namespace"), ""))
	}
	if s.Spec.Service.Name == "" {
		errs = append(errs, field.Required(fldPath.Child("name"), ""))
	}
	port := ptr.Deref(s.Spec.Service.Port, int32(0))
	if msgs := validation.IsValidPortNum(int(port)); msgs != nil {
		errs = append(errs, field.Invalid(fldPath.Child("port"), port, "port is not valid: "+strings.Join(msgs, ", ")))
	}
	if s.Spec.InsecureSkipTLSVerify && len(s.Spec.CABundle) > 0 {
		errs = append(errs, field.Invalid(spec.Child("insecureSkipTLSVerify"), true,
			"may not be true if caBundle is present"))
	}
	return errs
}
