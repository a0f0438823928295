package endpoints

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"
	kjson "sigs.k8s.io/json"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/decodelimits"
)

// checkPatchFields finds duplicate fields of a patch, and unknown fields of a JSON patch. It
// returns an error for them if fieldValidation is Strict, and adds warnings if it is Warn.
// Duplicates can only be found in the text of the patch, because applying the patch drops them.
// Patches that cannot be parsed are ignored here; the registry rejects them.
func checkPatchFields(ctx context.Context, req *api.Request) error {
	validation := fieldValidation(req)
	if validation == metav1.FieldValidationIgnore {
		return nil
	}
	if req.Patch.Type == types.ApplyYAMLPatchType {
		return checkApplyFields(ctx, req.Patch.Body, validation)
	}
	if req.Patch.Type == types.ApplyCBORPatchType || decodelimits.CheckJSON(req.Patch.Body, nil) != nil {
		return nil
	}
	found := strictPatchErrors(req)
	if len(found) == 0 {
		return nil
	}
	if validation == metav1.FieldValidationStrict {
		return apierrors.NewInvalid(schema.GroupKind{}, "", field.ErrorList{
			field.Invalid(field.NewPath("patch"), api.Truncate(string(req.Patch.Body), 1024),
				runtime.NewStrictDecodingError(found).Error()),
		})
	}
	for _, err := range found {
		api.Warn(ctx, err.Error())
	}
	return nil
}

// strictPatchErrors returns errors about duplicate fields of a JSON, merge or strategic merge
// patch, and about unknown fields of a JSON patch.
func strictPatchErrors(req *api.Request) []error {
	if req.Patch.Type != types.JSONPatchType {
		var fields map[string]any
		found, err := kjson.UnmarshalStrict(req.Patch.Body, &fields, kjson.DisallowDuplicateFields)
		if err != nil {
			return nil
		}
		return found
	}
	var operations []struct {
		Op    string          `json:"op"`
		Path  string          `json:"path"`
		From  string          `json:"from"`
		Value json.RawMessage `json:"value"`
	}
	found, err := kjson.UnmarshalStrict(req.Patch.Body, &operations)
	if err != nil {
		return nil
	}
	for i, err := range found {
		found[i] = fmt.Errorf("json patch %v", err)
	}
	return found
}

// checkApplyFields finds duplicate fields of an apply configuration. If validation is Strict, it
// returns an error with the lines of the fields; if it is Warn, it adds a warning.
func checkApplyFields(ctx context.Context, patch []byte, validation string) error {
	if text := bytes.TrimSpace(patch); len(text) > 0 && text[0] == '{' && decodelimits.CheckJSON(text, nil) == nil {
		var fields map[string]any
		// Most clients send JSON, which is parsed much faster than YAML.
		if found, err := kjson.UnmarshalStrict(text, &fields, kjson.DisallowDuplicateFields); err == nil &&
			len(found) == 0 {
			return nil
		}
	}
	_, duplicates, err := decodelimits.FromYAMLStrict(patch)
	if err != nil || duplicates == nil {
		return nil
	}
	if validation == metav1.FieldValidationStrict {
		return apierrors.NewBadRequest(fmt.Sprintf("error strict decoding patch: %v", duplicates))
	}
	api.Warn(ctx, duplicates.Error())
	return nil
}
