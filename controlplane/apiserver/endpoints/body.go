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

// decode decodes data into the object into, which has the type want. The body must be of this type;
// a body without kind and apiVersion is accepted. media is the media type of data. validation is
// "Strict", "Warn" or "Ignore" and decides whether unknown and duplicate fields are errors,
// warnings or ignored.
func (d *decoder) decode(ctx context.Context, data []byte, media string, want schema.GroupVersionKind, into runtime.Object, validation string) error {
	if len(bytes.TrimSpace(data)) == 0 {
		return apierrors.NewBadRequest(fmt.Sprintf("the object provided is unrecognized (must be of type %s): the body is empty", want.Kind))
	}
	var found schema.GroupVersionKind
	var strict []error
	var err error
	switch media {
	case mediaProto:
		if raw, e := rawMessage(data); e == nil {
			err = decodelimits.CheckProto(raw, into)
		}
		if err == nil {
			found, err = d.decodeProto(data, want, into)
		}
	case mediaCBOR:
		if data, err = decodelimits.FromCBOR(data); err == nil {
			err = decodelimits.CheckJSON(data, into)
		}
		if err == nil {
			found, strict, err = decodeJSON(data, into, validation != metav1.FieldValidationIgnore)
		}
	case mediaYAML:
		var duplicates error
		if data, duplicates, err = fromYAML(data, validation != metav1.FieldValidationIgnore); err == nil {
			err = decodelimits.CheckJSON(data, into)
		}
		if err == nil {
			found, strict, err = decodeJSON(data, into, validation != metav1.FieldValidationIgnore)
			if duplicates != nil {
				strict = append(strict, duplicates)
			}
		}
	default:
		if err = decodelimits.CheckJSON(data, into); err == nil {
			found, strict, err = decodeJSON(data, into, validation != metav1.FieldValidationIgnore)
		}
	}
	if errors.Is(err, decodelimits.ErrTooMuch) {
		return apierrors.NewRequestEntityTooLargeError(err.Error())
	}
	if err != nil {
		return undecodable(err, found, want, data)
	}
	if err := sameType(found, want); err != nil {
		return err
	}
	into.GetObjectKind().SetGroupVersionKind(want)
	if len(strict) == 0 {
		return nil
	}
	if validation == metav1.FieldValidationStrict {
		return undecodable(runtime.NewStrictDecodingError(strict), want, want, data)
	}
	for _, e := range strict {
		api.Warn(ctx, e.Error())
	}
	return nil
}

func (d *decoder) decodeProto(data []byte, want schema.GroupVersionKind, into runtime.Object) (schema.GroupVersionKind, error) {
	_, found, err := d.proto.Decode(data, &want, into)
	if found == nil {
		return schema.GroupVersionKind{}, err
	}
	if err != nil && found.GroupVersion() == want.GroupVersion() && found.Kind == want.Kind {
		return *found, err
	}
	if *found != want {
		return *found, nil // the caller reports the wrong type
	}
	return *found, err
}

// decodeJSON decodes data into the object into and returns the type in the body. strict are errors
// about unknown and duplicate fields, if wantStrict is set.
func decodeJSON(data []byte, into runtime.Object, wantStrict bool) (found schema.GroupVersionKind, strict []error, err error) {
	var tm struct {
		APIVersion string `json:"apiVersion"`
		Kind       string `json:"kind"`
	}
	if strict, err = api.DecodeJSON(data, into, wantStrict); err != nil {
		// The error message includes the kind of the body if it can be read.
		if kjson.UnmarshalCaseSensitivePreserveInts(data, &tm) != nil {
			return found, nil, fmt.Errorf("couldn't get version/kind; json parse error: %w", err)
		}
		gv, _ := schema.ParseGroupVersion(tm.APIVersion)
		return gv.WithKind(tm.Kind), nil, api.Misfit(data, into, err)
	}
	return into.GetObjectKind().GroupVersionKind(), strict, nil
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

// undecodable returns Kubernetes' 400 error for a body that cannot be decoded as want. found is the
// type in the body, if known.
func undecodable(err error, found, want schema.GroupVersionKind, data []byte) error {
	if found.Kind != "" {
		return apierrors.NewBadRequest(fmt.Sprintf("%s in version %q cannot be handled as a %s: %v", found.Kind, found.Version, want.Kind, err))
	}
	summary := string(data)
	if len(summary) > 30 {
		summary = summary[:30] + " ..."
	}
	return apierrors.NewBadRequest(fmt.Sprintf("the object provided is unrecognized (must be of type %s): %v (%q)", want.Kind, err, summary))
}

func sameType(found, want schema.GroupVersionKind) error {
	if found.Empty() {
		return nil
	}
	if (found.Version != "" || found.Group != "") && found.GroupVersion() != want.GroupVersion() {
		return apierrors.NewBadRequest(fmt.Sprintf("the API version in the data (%s) does not match the expected API version (%s)", found.GroupVersion(), want.GroupVersion()))
	}
	if found.Kind != "" && found.Kind != want.Kind {
		return apierrors.NewBadRequest(fmt.Sprintf("%s in version %q cannot be handled as a %s: the kind in the data does not match the expected kind", found.Kind, found.Version, want.Kind))
	}
	return nil
}
