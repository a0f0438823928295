package crd

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metav1validation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/custom"
	"keelson.dev/keelson/controlplane/apiserver/webhook"
)

// Limits of the requests and responses of conversion webhooks.
const (
	webhookTimeout = 30 * time.Second
	batchObjects   = 500
	batchBytes     = 2 << 20 // bytes of the objects in a request; a larger object is sent in its own request
	answerGrows    = 4       // a response may be this many times larger than the objects in its request ...
	answerBytes    = 1 << 20 // ... plus this many bytes
	questions      = 8       // concurrent requests to one webhook
)

// webhookConverter converts objects by the conversion webhook of one definition.
type webhookConverter struct {
	config *apiextensionsv1.WebhookConversion
	hooks  Hooks
	slots  chan struct{}

	mu       sync.Mutex
	endpoint *webhook.Endpoint // created at the first conversion
}

func newWebhook(c *apiextensionsv1.CustomResourceDefinition, hooks Hooks) *webhookConverter {
	return &webhookConverter{config: c.Spec.Conversion.Webhook, hooks: hooks, slots: make(chan struct{}, questions)}
}

// openEndpoint returns the endpoint of the webhook. It does not connect.
func (w *webhookConverter) openEndpoint() (*webhook.Endpoint, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.endpoint != nil {
		return w.endpoint, nil
	}
	at, err := w.endpointAddress()
	if err != nil {
		return nil, err
	}
	w.endpoint, err = webhook.NewEndpoint(at)
	return w.endpoint, err
}

// closeEndpoint closes the idle connections to the webhook, after its definition was removed or
// replaced.
func (w *webhookConverter) closeEndpoint() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.endpoint != nil {
		w.endpoint.Close()
	}
}

func (w *webhookConverter) endpointAddress() (at webhook.Address, err error) {
	if w.config == nil || w.config.ClientConfig == nil {
		return at, errors.New("the definition has no webhook")
	}
	conf := w.config.ClientConfig
	at.CA = bytes.TrimSpace(conf.CABundle)
	if conf.URL != nil {
		at.URL = *conf.URL
		return at, nil
	}
	s := conf.Service
	if s == nil || w.hooks.ForService == nil {
		return at, errors.New("this replica cannot connect to services")
	}
	port, path := int32(443), ""
	if s.Port != nil {
		port = *s.Port
	}
	if s.Path != nil {
		path = *s.Path
	}
	at.ServerName, at.Dial = s.Name+"."+s.Namespace+".svc", w.hooks.ForService(s.Namespace, s.Name, port)
	at.URL = fmt.Sprintf("https://%s:%d%s", at.ServerName, port, path)
	return at, nil
}

// convertObjects returns the objects converted to the version v. It sends them to the webhook in
// batches. Objects that already have this version are only copied.
func (w *webhookConverter) convertObjects(ctx context.Context, objs []api.Object, v *version) ([]api.Object, error) {
	out := make([]api.Object, len(objs))
	var batch []int
	var raw [][]byte
	size := 0
	flush := func() error {
		if len(batch) == 0 {
			return nil
		}
		answers, err := w.callWebhook(ctx, raw, size, v)
		if err != nil {
			return fmt.Errorf("conversion webhook for %v failed: %w", objs[batch[0]].GetObjectKind().GroupVersionKind(),
				asPlainError(err))
		}
		for j, i := range batch {
			if out[i], err = decodeConverted(objs[i].(*custom.Object), answers[j].Raw, v); err != nil {
				return fmt.Errorf("conversion webhook for %v returned invalid converted object at index %v: %w",
					objs[i].GetObjectKind().GroupVersionKind(), j, err)
			}
		}
		batch, raw, size = nil, nil, 0
		return nil
	}
	for i, o := range objs {
		if o.GetObjectKind().GroupVersionKind() == v.gvk {
			out[i] = o.DeepCopyObject().(api.Object)
			continue
		}
		data, err := o.(*custom.Object).MarshalJSON()
		if err != nil {
			return nil, err
		}
		if len(batch) == batchObjects || size+len(data) > batchBytes {
			if err := flush(); err != nil {
				return nil, err
			}
		}
		batch, raw, size = append(batch, i), append(raw, data), size+len(data)
	}
	return out, flush()
}

// asPlainError replaces an API status error, such as that of a missing Service, by a plain error.
// Otherwise the client would receive this status, which does not say that the webhook failed.
func asPlainError(err error) error {
	if status := apierrors.APIStatus(nil); errors.As(err, &status) {
		return errors.New(err.Error())
	}
	return err
}

// review is the type that encodes ConversionReviews; v1 and v1beta1 have the same JSON.
type review = apiextensionsv1.ConversionReview

// reviewVersion returns the first version in the webhook's list of ConversionReview versions that
// this server supports.
func (w *webhookConverter) reviewVersion() (string, error) {
	for _, v := range w.config.ConversionReviewVersions {
		if v == "v1" || v == "v1beta1" {
			return apiextensionsv1.GroupName + "/" + v, nil
		}
	}
	return "", errors.New("no supported conversion review versions")
}

// callWebhook sends one batch to the webhook and returns the converted objects. size is the total
// size of raw.
func (w *webhookConverter) callWebhook(ctx context.Context, raw [][]byte, size int, v *version) (
	[]runtime.RawExtension, error,
) {
	ctx, cancel := context.WithTimeoutCause(ctx, webhookTimeout,
		fmt.Errorf("no response within %v: %w", webhookTimeout, context.DeadlineExceeded))
	defer cancel()
	to, err := w.openEndpoint()
	if err != nil {
		return nil, err
	}
	as, err := w.reviewVersion()
	if err != nil {
		return nil, err
	}
	question := review{TypeMeta: metav1.TypeMeta{APIVersion: as, Kind: "ConversionReview"},
		Request: &apiextensionsv1.ConversionRequest{UID: uuid.NewUUID(),
			DesiredAPIVersion: v.gvk.GroupVersion().String()}}
	for _, data := range raw {
		question.Request.Objects = append(question.Request.Objects, runtime.RawExtension{Raw: data})
	}
	select {
	case w.slots <- struct{}{}:
		defer func() { <-w.slots }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	var answer review
	if err := postReview(ctx, to, &question, &answer, answerGrows*size+answerBytes); err != nil {
		return nil, err
	}
	r := answer.Response
	switch {
	case answer.Kind != "ConversionReview" || answer.APIVersion != as:
		return nil, fmt.Errorf("expected webhook response of %s, Kind=ConversionReview, got %s, Kind=%s", as,
			answer.APIVersion, answer.Kind)
	case r == nil:
		return nil, errors.New("no response provided")
	case r.UID != question.Request.UID:
		return nil, fmt.Errorf("expected response.uid=%q, got %q", question.Request.UID,
			api.Truncate(string(r.UID), 64))
	case r.Result.Status != metav1.StatusSuccess && r.Result.Message != "":
		return nil, errors.New(api.Truncate(r.Result.Message, 1024))
	case r.Result.Status != metav1.StatusSuccess:
		return nil, fmt.Errorf("response.result.status was '%s', not 'Success'", api.Truncate(r.Result.Status, 64))
	case len(r.ConvertedObjects) != len(raw):
		return nil, fmt.Errorf("returned %d objects, expected %d", len(r.ConvertedObjects), len(raw))
	}
	return r.ConvertedObjects, nil
}

func postReview(ctx context.Context, endpoint *webhook.Endpoint, request, response any, limit int) error {
	body, err := json.Marshal(request)
	if err != nil {
		return err
	}
	data, err := endpoint.Ask(ctx, "", body, limit)
	if err != nil {
		return failureCause(ctx, err)
	}
	if err := json.Unmarshal(data, response); err != nil {
		return fmt.Errorf("the response is not a ConversionReview: %w", err)
	}
	return nil
}

func failureCause(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// decodeConverted decodes an object from a response. It must have the kind, name, namespace and UID
// of the source object. Changed labels and annotations are kept; all other metadata is that of
// source.
func decodeConverted(source *custom.Object, raw []byte, v *version) (api.Object, error) {
	out := &custom.Object{Shape: v}
	if _, err := out.DecodeJSON(raw, false); err != nil {
		return nil, err
	}
	switch {
	case out.APIVersion != v.gvk.GroupVersion().String():
		return nil, fmt.Errorf("invalid groupVersion (expected %v, received %v)", v.gvk.GroupVersion(),
			api.Truncate(out.APIVersion, 256))
	case out.Kind != source.Kind:
		return nil, fmt.Errorf("must have the same kind: %v != %v", source.Kind, api.Truncate(out.Kind, 256))
	case out.Name != source.Name:
		return nil, fmt.Errorf("must have the same name: %v != %v", source.Name, api.Truncate(out.Name, 256))
	case out.Namespace != source.Namespace:
		return nil, fmt.Errorf("must have the same namespace: %v != %v", source.Namespace,
			api.Truncate(out.Namespace, 256))
	case out.UID != source.UID:
		return nil, fmt.Errorf("must have the same UID: %v != %v", source.UID, api.Truncate(string(out.UID), 64))
	}
	at := field.NewPath("metadata")
	errs := append(metav1validation.ValidateLabels(out.Labels, at.Child("labels")),
		validation.ValidateAnnotations(out.Annotations, at.Child("annotations"))...)
	if len(errs) > 0 {
		return nil, errs.ToAggregate()
	}
	labels, annotations := out.Labels, out.Annotations
	source.ObjectMeta.DeepCopyInto(&out.ObjectMeta)
	out.Labels, out.Annotations = labels, annotations
	return out, nil
}
