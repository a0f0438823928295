package webhooks

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	admissionv1 "k8s.io/api/admission/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/decodelimits"
	"keelson.dev/keelson/controlplane/apiserver/admission/matching"
)

// Limits of a webhook's response: bytes of the body for validating and mutating webhooks, bytes of
// the message, and numbers of annotations and warnings. The body of a mutating webhook contains a
// base64-encoded patch.
const (
	maxValidating  = 1 << 20
	maxMutating    = 5 << 20
	maxMessage     = 16 << 10
	maxAnnotations = 32
	maxWarnings    = 32
)

// API group, kind and version v1 of AdmissionReview. All versions have the same fields, but require
// different fields in a response.
const (
	reviewGroup = "admission.k8s.io/"
	reviewKind  = "AdmissionReview"
	reviewV1    = "v1"
)

// encodedObjects is the JSON of the new and old object of a view. All webhooks that receive the
// same view share it.
type encodedObjects struct {
	object, old json.RawMessage
}

func encodeObjects(v *matching.View) (e encodedObjects, err error) {
	if e.object, err = encodeObject(v.Object); err != nil {
		return e, err
	}
	e.old, err = encodeObject(v.Old)
	return e, err
}

func encodeObject(o runtime.Object) (json.RawMessage, error) {
	if o == nil {
		return nil, nil
	}
	return json.Marshal(o)
}

// newReview returns the JSON of the AdmissionReview request that is sent to a webhook.
func newReview(version string, uid types.UID, a *matching.Attempt, v *matching.View, e encodedObjects) ([]byte, error) {
	r := a.Request(v.Target)
	r.UID, r.Object.Raw, r.OldObject.Raw = uid, e.object, e.old
	return json.Marshal(&admissionv1.AdmissionReview{
		TypeMeta: metav1.TypeMeta{APIVersion: reviewGroup + version, Kind: reviewKind}, Request: r,
	})
}

// reviewResponse contains the fields of an AdmissionResponse that this server uses.
type reviewResponse struct {
	UID              types.UID         `json:"uid"`
	Allowed          bool              `json:"allowed"`
	Status           *metav1.Status    `json:"status"`
	Patch            []byte            `json:"patch"`
	PatchType        *string           `json:"patchType"`
	AuditAnnotations map[string]string `json:"auditAnnotations"`
	Warnings         []string          `json:"warnings"`
}

// readResponse decodes the response of a webhook. It returns an error if the response is invalid or
// has another UID than the request.
func readResponse(data []byte, version string, uid types.UID, mutating bool) (*reviewResponse, error) {
	var review struct {
		APIVersion string          `json:"apiVersion"`
		Kind       string          `json:"kind"`
		Response   json.RawMessage `json:"response"`
	}
	if err := json.Unmarshal(data, &review); err != nil {
		return nil, fmt.Errorf("couldn't get version/kind; json parse error: %w", err)
	}
	if len(review.Response) == 0 || string(review.Response) == "null" {
		return nil, errors.New("webhook response was absent")
	}
	if err := decodelimits.CheckJSON(review.Response, nil); err != nil {
		return nil, err
	}
	a := &reviewResponse{}
	if err := json.Unmarshal(review.Response, a); err != nil {
		return nil, err
	}
	if version != reviewV1 { // uid, version and patch type of v1beta1 responses are not checked
		if mutating && len(a.Patch) > 0 {
			a.PatchType = new(string)
			*a.PatchType = string(admissionv1.PatchTypeJSONPatch)
		}
		if !mutating {
			a.Patch = nil
		}
		return a, nil
	}
	if a.UID != uid {
		return nil, fmt.Errorf("expected response.uid=%q, got %q", uid, api.Truncate(string(a.UID), 64))
	}
	if review.APIVersion != reviewGroup+reviewV1 || review.Kind != reviewKind {
		return nil, fmt.Errorf("expected webhook response of %s, got %s, Kind=%s",
			reviewGroup+reviewV1+", Kind="+reviewKind,
			api.Truncate(review.APIVersion, 64), api.Truncate(review.Kind, 64))
	}
	return a, a.checkPatch(mutating)
}

func (a *reviewResponse) checkPatch(mutating bool) error {
	switch {
	case !mutating && len(a.Patch) > 0:
		return errors.New("validating webhook may not return response.patch")
	case !mutating && a.PatchType != nil:
		return errors.New("validating webhook may not return response.patchType")
	case len(a.Patch) > 0 && a.PatchType == nil:
		return errors.New("webhook returned response.patch but not response.patchType")
	case len(a.Patch) == 0 && a.PatchType != nil:
		return errors.New("webhook returned response.patchType but not response.patch")
	case a.PatchType != nil && *a.PatchType == "":
		return errors.New(`webhook returned invalid response.patchType of ""`)
	}
	return nil
}

// newDenial returns the API error for a request that a webhook denies.
func newDenial(name string, status *metav1.Status) *apierrors.StatusError {
	s := ptr.Deref(status, metav1.Status{})
	if s.Code < http.StatusBadRequest || s.Code >= maxCode {
		s.Code = http.StatusBadRequest
	}
	if s.Status == "" || s.Status == metav1.StatusSuccess {
		s.Status = metav1.StatusFailure
	}
	s.Message, s.Reason = api.Truncate(s.Message, maxMessage), metav1.StatusReason(api.Truncate(string(s.Reason), 256))
	by := fmt.Sprintf("admission webhook %q denied the request", name)
	switch {
	case s.Message != "":
		s.Message = by + ": " + s.Message
	case s.Reason != "":
		s.Message = by + ": " + string(s.Reason)
	default:
		s.Message = by + " without explanation"
	}
	return &apierrors.StatusError{ErrStatus: s}
}
