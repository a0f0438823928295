package endpoints

import (
	"errors"
	"fmt"
	"net/url"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metainternal "k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metainternalvalidation "k8s.io/apimachinery/pkg/apis/meta/internalversion/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metav1validation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/decodelimits"
	answers "keelson.dev/keelson/controlplane/api/fields"
)

// decodeOptions decodes the query parameters into the options of the request's verb and validates
// them.
func decodeOptions(q url.Values, req *api.Request) error {
	if len(q) == 0 {
		return nil
	}
	var err error
	var errs field.ErrorList
	kind := ""
	switch req.Verb {
	case api.VerbGet:
		err = metav1.Convert_url_Values_To_v1_GetOptions(&q, &req.Get, nil)
	case api.VerbList, api.VerbWatch:
		return listOptions(q, &req.List, req.Verb == api.VerbWatch)
	case api.VerbDeleteCollection:
		if err := listOptions(q, &req.List, false); err != nil {
			return err
		}
		err = metav1.Convert_url_Values_To_v1_DeleteOptions(&q, &req.Delete, nil)
	case api.VerbCreate:
		kind, err = "CreateOptions", metav1.Convert_url_Values_To_v1_CreateOptions(&q, &req.Create, nil)
		errs = metav1validation.ValidateCreateOptions(&req.Create)
	case api.VerbUpdate:
		kind, err = "UpdateOptions", metav1.Convert_url_Values_To_v1_UpdateOptions(&q, &req.Update, nil)
		errs = metav1validation.ValidateUpdateOptions(&req.Update)
	case api.VerbPatch:
		kind, err = "PatchOptions", metav1.Convert_url_Values_To_v1_PatchOptions(&q, &req.Patch.Options, nil)
	case api.VerbDelete:
		err = metav1.Convert_url_Values_To_v1_DeleteOptions(&q, &req.Delete, nil)
	}
	if err != nil {
		return apierrors.NewBadRequest(err.Error())
	}
	return newInvalid(kind, errs)
}

// newInvalid returns a 422 error for invalid options; nil if errs is empty.
func newInvalid(kind string, errs field.ErrorList) error {
	if len(errs) == 0 {
		return nil
	}
	return apierrors.NewInvalid(schema.GroupKind{Group: metav1.GroupName, Kind: kind}, "", errs)
}

func listOptions(q url.Values, o *metav1.ListOptions, watch bool) error {
	if err := metav1.Convert_url_Values_To_v1_ListOptions(&q, o, nil); err != nil {
		return apierrors.NewBadRequest(err.Error())
	}
	o.Watch = watch
	known := answers.LoadTable().AnswersFor(o)
	known.Drop(o, nil)
	if errs, _ := known.FindIneffective(o, nil); len(errs) > 0 {
		return newInvalid("ListOptions", errs)
	}
	var in metainternal.ListOptions
	if err := metainternal.Convert_v1_ListOptions_To_internalversion_ListOptions(o, &in, nil); err != nil {
		return apierrors.NewBadRequest(err.Error())
	}
	return newInvalid("ListOptions", metainternalvalidation.ValidateListOptions(&in, true))
}

// onlyName restricts a list or watch to one object, for the deprecated path /watch/.../{name}.
func onlyName(o *metav1.ListOptions, name string) {
	sel := fields.OneTermEqualSelector(metav1.ObjectNameField, name).String()
	if o.FieldSelector != "" {
		sel = o.FieldSelector + "," + sel
	}
	o.FieldSelector = sel
}

// fieldValidation returns the fieldValidation option, which determines how unknown and duplicate
// fields are treated: "Strict", "Warn" (the default) or "Ignore".
func fieldValidation(req *api.Request) string {
	v := ""
	switch req.Verb {
	case api.VerbCreate:
		v = req.Create.FieldValidation
	case api.VerbUpdate:
		v = req.Update.FieldValidation
	case api.VerbPatch:
		v = req.Patch.Options.FieldValidation
	}
	if v == "" {
		return metav1.FieldValidationWarn
	}
	return v
}

// toJSON converts a YAML or CBOR body to JSON.
func toJSON(data []byte, media string) ([]byte, error) {
	if media == mediaCBOR {
		return decodelimits.FromCBOR(data)
	}
	out, _, err := fromYAML(data, false)
	return out, err
}

// deleteOptions decodes the body of a delete request into its DeleteOptions. Values in the body
// replace those of the query parameters.
func (h *Handler) deleteOptions(data []byte, media string, req *api.Request) error {
	if len(data) > 0 {
		if err := decodelimits.CheckJSON(data, &req.Delete); err != nil && media == mediaJSON {
			return apierrors.NewRequestEntityTooLargeError(err.Error())
		}
		if media == mediaProto {
			if err := unwrapProto(data, &req.Delete); err != nil {
				return apierrors.NewBadRequest(fmt.Sprintf("the DeleteOptions cannot be decoded: %v", err))
			}
		} else {
			if media == mediaYAML || media == mediaCBOR {
				out, err := toJSON(data, media)
				if errors.Is(err, decodelimits.ErrTooMuch) {
					return apierrors.NewRequestEntityTooLargeError(err.Error())
				}
				if err != nil {
					return apierrors.NewBadRequest(err.Error())
				}
				data = out
			}
			found, _, err := decodeJSON(data, &req.Delete, false)
			if err != nil {
				return newUndecodable(err, found, schema.GroupVersionKind{Version: "v1", Kind: "DeleteOptions"}, data)
			}
			if found.Kind != "" && found.Kind != "DeleteOptions" {
				return apierrors.NewBadRequest(fmt.Sprintf("%s in version %q cannot be handled as DeleteOptions",
					found.Kind, found.Version))
			}
		}
	}
	return newInvalid("DeleteOptions", metav1validation.ValidateDeleteOptions(&req.Delete))
}
