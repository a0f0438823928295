package endpoints

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	kjson "sigs.k8s.io/json"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/decodelimits"
)

// readBody returns the body of a request. A body of more than limit bytes is a 413 error.
func readBody(w http.ResponseWriter, r *http.Request, limit int64) ([]byte, error) {
	if r.ContentLength > limit {
		return nil, tooLarge(limit)
	}
	var buf bytes.Buffer
	if r.ContentLength > 0 {
		buf.Grow(int(r.ContentLength) + bytes.MinRead)
	}
	_, err := buf.ReadFrom(http.MaxBytesReader(w, r.Body, limit))
	var over *http.MaxBytesError
	switch {
	case errors.As(err, &over):
		return nil, tooLarge(limit)
	case errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, context.Canceled):
		return nil, apierrors.NewBadRequest(fmt.Sprintf("reading the body: %v", err))
	case err != nil:
		return nil, apierrors.NewBadRequest(fmt.Sprintf("unable to read the body: %v", err))
	}
	return buf.Bytes(), nil
}

func tooLarge(limit int64) error {
	return apierrors.NewRequestEntityTooLargeError(fmt.Sprintf("limit is %d", limit))
}

// decoder decodes request bodies into objects.
type decoder struct {
	proto *protobuf.Serializer
}

func newDecoder(s *runtime.Scheme) *decoder {
	return &decoder{proto: protobuf.NewSerializer(s, s)}
}

// decodeObject decodes data into the object target, which has the type expected. The body must be
// of this type, or have neither kind nor apiVersion. media is the media type of data. validation is
// "Strict", "Warn" or "Ignore": unknown and duplicate fields are errors, warnings or ignored.
func (d *decoder) decodeObject(
	ctx context.Context, data []byte, media string, expected schema.GroupVersionKind, target runtime.Object,
	validation string,
) error {
	if len(bytes.TrimSpace(data)) == 0 {
		return apierrors.NewBadRequest(fmt.Sprintf(
			"the object provided is unrecognized (must be of type %s): the body is empty", expected.Kind))
	}
	var found schema.GroupVersionKind
	var strict []error
	var err error
	switch media {
	case mediaProto:
		if raw, e := rawMessage(data); e == nil {
			err = decodelimits.CheckProto(raw, target)
		}
		if err == nil {
			found, err = d.decodeProto(data, expected, target)
		}
	case mediaCBOR:
		if data, err = decodelimits.FromCBOR(data); err == nil {
			err = decodelimits.CheckJSON(data, target)
		}
		if err == nil {
			found, strict, err = decodeJSON(data, target, validation != metav1.FieldValidationIgnore)
		}
	case mediaYAML:
		var duplicates error
		if data, duplicates, err = fromYAML(data, validation != metav1.FieldValidationIgnore); err == nil {
			err = decodelimits.CheckJSON(data, target)
		}
		if err == nil {
			found, strict, err = decodeJSON(data, target, validation != metav1.FieldValidationIgnore)
			if duplicates != nil {
				strict = append(strict, duplicates)
			}
		}
	default:
		if err = decodelimits.CheckJSON(data, target); err == nil {
			found, strict, err = decodeJSON(data, target, validation != metav1.FieldValidationIgnore)
		}
	}
	if errors.Is(err, decodelimits.ErrTooMuch) {
		return apierrors.NewRequestEntityTooLargeError(err.Error())
	}
	if err != nil {
		return newUndecodable(err, found, expected, data)
	}
	if err := sameType(found, expected); err != nil {
		return err
	}
	target.GetObjectKind().SetGroupVersionKind(expected)
	if len(strict) == 0 {
		return nil
	}
	if validation == metav1.FieldValidationStrict {
		return newUndecodable(runtime.NewStrictDecodingError(strict), expected, expected, data)
	}
	for _, e := range strict {
		api.Warn(ctx, e.Error())
	}
	return nil
}

func (d *decoder) decodeProto(data []byte, expected schema.GroupVersionKind, target runtime.Object) (
	schema.GroupVersionKind, error,
) {
	_, found, err := d.proto.Decode(data, &expected, target)
	if found == nil {
		return schema.GroupVersionKind{}, err
	}
	if err != nil && found.GroupVersion() == expected.GroupVersion() && found.Kind == expected.Kind {
		return *found, err
	}
	if *found != expected {
		return *found, nil // the caller reports the wrong type
	}
	return *found, err
}

// decodeJSON decodes data into the object target. It returns the kind and apiVersion in the body.
// If wantStrict is true, strict contains errors about unknown and duplicate fields.
func decodeJSON(data []byte, target runtime.Object, wantStrict bool) (
	found schema.GroupVersionKind, strict []error, err error,
) {
	var tm struct {
		APIVersion string `json:"apiVersion"`
		Kind       string `json:"kind"`
	}
	if strict, err = api.DecodeJSON(data, target, wantStrict); err != nil {
		// the error message contains the kind of the body if it can be read
		if kjson.UnmarshalCaseSensitivePreserveInts(data, &tm) != nil {
			return found, nil, fmt.Errorf("couldn't get version/kind; json parse error: %w", err)
		}
		gv, _ := schema.ParseGroupVersion(tm.APIVersion)
		return gv.WithKind(tm.Kind), nil, api.DescribeMismatch(data, target, err)
	}
	return target.GetObjectKind().GroupVersionKind(), strict, nil
}

func fromYAML(data []byte, strict bool) (out []byte, duplicates, err error) {
	if strict {
		out, duplicates, err = decodelimits.FromYAMLStrict(data)
	} else {
		out, err = decodelimits.FromYAML(data)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("yaml parse error: %w", err)
	}
	return out, duplicates, nil
}

// newUndecodable returns Kubernetes' 400 error for a body that cannot be decoded as expected.
// actual is the type in the body, if known.
func newUndecodable(err error, actual, expected schema.GroupVersionKind, data []byte) error {
	if actual.Kind != "" {
		return apierrors.NewBadRequest(fmt.Sprintf("%s in version %q cannot be handled as a %s: %v", actual.Kind,
			actual.Version, expected.Kind, err))
	}
	summary := string(data)
	if len(summary) > 30 {
		summary = summary[:30] + " ..."
	}
	return apierrors.NewBadRequest(fmt.Sprintf("the object provided is unrecognized (must be of type %s): %v (%q)",
		expected.Kind, err, summary))
}

func sameType(actual, expected schema.GroupVersionKind) error {
	if actual.Empty() {
		return nil
	}
	if (actual.Version != "" || actual.Group != "") && actual.GroupVersion() != expected.GroupVersion() {
		return apierrors.NewBadRequest(fmt.Sprintf("the API version in the data (%s) does not match the expected API "+
			"version (%s)", actual.GroupVersion(), expected.GroupVersion()))
	}
	if actual.Kind != "" && actual.Kind != expected.Kind {
		return apierrors.NewBadRequest(fmt.Sprintf("%s in version %q cannot be handled as a %s: the kind in the data "+
			"does not match the expected kind", actual.Kind, actual.Version, expected.Kind))
	}
	return nil
}
