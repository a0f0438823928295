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
	batchBytes     = 2 << 20 // of the objects in a request; a larger single object has its own request
	answerGrows    = 4       // a response may be this many times larger than the objects in the request
	answerBytes    = 1 << 20 // and this much larger in addition
	questions      = 8       // concurrent requests to one webhook
)

// asked converts objects by the conversion webhook of one definition.
type asked struct {
	config *apiextensionsv1.WebhookConversion
	hooks  Hooks
	places chan struct{}

	mu   sync.Mutex
	made *webhook.Endpoint // created at the first conversion
}

func newWebhook(c *apiextensionsv1.CustomResourceDefinition, hooks Hooks) *asked {
	return &asked{config: c.Spec.Conversion.Webhook, hooks: hooks, places: make(chan struct{}, questions)}
}

// endpoint returns the endpoint of the webhook. It does not connect.
func (w *asked) endpoint() (*webhook.Endpoint, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.made != nil {
		return w.made, nil
	}
	at, err := w.address()
	if err != nil {
		return nil, err
	}
	w.made, err = webhook.NewEndpoint(at)
	return w.made, err
}

// close closes the idle connections to the webhook, after its definition was removed or replaced.
func (w *asked) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.made != nil {
		w.made.Close()
	}
}

func (w *asked) address() (at webhook.Address, err error) {
	if w.config == nil || w.config.ClientConfig == nil {
		return at, errors.New("the definition names no webhook")
	}
	conf := w.config.ClientConfig
	at.CA = bytes.TrimSpace(conf.CABundle)
	if conf.URL != nil {
		at.URL = *conf.URL
		return at, nil
	}
	s := conf.Service
	if s == nil || w.hooks.ForService == nil {
		return at, errors.New("services cannot be reached from here")
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

// convert returns the objects in the version v. It sends them to the webhook in batches; objects of
// that version are only copied. It implements converter.to.
func (w *asked) convert(ctx context.Context, objs []api.Object, v *version) ([]api.Object, error) {
	out := make([]api.Object, len(objs))
	var batch []int
	var raw [][]byte
	size := 0
	flush := func() error {
		if len(batch) == 0 {
			return nil
		}
		answers, err := w.ask(ctx, raw, size, v)
		if err != nil {
			return fmt.Errorf("conversion webhook for %v failed: %w", objs[batch[0]].GetObjectKind().GroupVersionKind(), ownWords(err))
		}
		for j, i := range batch {
			if out[i], err = converted(objs[i].(*custom.Object), answers[j].Raw, v); err != nil {
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

// ownWords replaces an API status error, such as that of a missing Service, by a plain error.
// Otherwise the status would become the response to the client, without the information that the
// webhook failed.
func ownWords(err error) error {
	if status := apierrors.APIStatus(nil); errors.As(err, &status) {
		return errors.New(err.Error())
	}
	return err
}

// review is a ConversionReview; v1 and v1beta1 have the same form.
type review = apiextensionsv1.ConversionReview

// reviewVersion returns the first supported version of ConversionReview in the webhook's list.
func (w *asked) reviewVersion() (string, error) {
	for _, v := range w.config.ConversionReviewVersions {
		if v == "v1" || v == "v1beta1" {
			return apiextensionsv1.GroupName + "/" + v, nil
		}
	}
	return "", errors.New("no supported conversion review versions")
}

// ask sends one batch to the webhook and returns the converted objects. size is the total size of
// raw.
func (w *asked) ask(ctx context.Context, raw [][]byte, size int, v *version) ([]runtime.RawExtension, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, webhookTimeout, fmt.Errorf("no answer within %v: %w", webhookTimeout, context.DeadlineExceeded))
	defer cancel()
	to, err := w.endpoint()
	if err != nil {
		return nil, err
	}
	as, err := w.reviewVersion()
	if err != nil {
		return nil, err
	}
	question := review{TypeMeta: metav1.TypeMeta{APIVersion: as, Kind: "ConversionReview"},
		Request: &apiextensionsv1.ConversionRequest{UID: uuid.NewUUID(), DesiredAPIVersion: v.gvk.GroupVersion().String()}}
	for _, data := range raw {
		question.Request.Objects = append(question.Request.Objects, runtime.RawExtension{Raw: data})
	}
	select {
	case w.places <- struct{}{}:
		defer func() { <-w.places }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	var answer review
	if err := post(ctx, to, &question, &answer, answerGrows*size+answerBytes); err != nil {
		return nil, err
	}
	r := answer.Response
	switch {
	case answer.Kind != "ConversionReview" || answer.APIVersion != as:
		return nil, fmt.Errorf("expected webhook response of %s, Kind=ConversionReview, got %s, Kind=%s", as, answer.APIVersion, answer.Kind)
	case r == nil:
		return nil, errors.New("no response provided")
	case r.UID != question.Request.UID:
		return nil, fmt.Errorf("expected response.uid=%q, got %q", question.Request.UID, api.Clip(string(r.UID), 64))
	case r.Result.Status != metav1.StatusSuccess && r.Result.Message != "":
		return nil, errors.New(api.Clip(r.Result.Message, 1024))
	case r.Result.Status != metav1.StatusSuccess:
		return nil, fmt.Errorf("response.result.status was '%s', not 'Success'", api.Clip(r.Result.Status, 64))
	case len(r.ConvertedObjects) != len(raw):
		return nil, fmt.Errorf("returned %d objects, expected %d", len(r.ConvertedObjects), len(raw))
	}
	return r.ConvertedObjects, nil
}

func post(ctx context.Context, to *webhook.Endpoint, question, answer any, limit int) error {
	body, err := json.Marshal(question)
	if err != nil {
		return err
	}
	data, err := to.Ask(ctx, "", body, limit)
	if err != nil {
		return cause(ctx, err)
	}
	if err := json.Unmarshal(data, answer); err != nil {
		return fmt.Errorf("the answer is no ConversionReview: %w", err)
	}
	return nil
}

func cause(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// converted decodes an object from a response. It must have the kind, name, namespace and UID of
// from. Of its metadata, only changed labels and annotations are kept.
func converted(from *custom.Object, raw []byte, v *version) (api.Object, error) {
	out := &custom.Object{Shape: v}
	if _, err := out.DecodeJSON(raw, false); err != nil {
		return nil, err
	}
	switch {
	case out.APIVersion != v.gvk.GroupVersion().String():
		return nil, fmt.Errorf("invalid groupVersion (expected %v, received %v)", v.gvk.GroupVersion(), api.Clip(out.APIVersion, 256))
	case out.Kind != from.Kind:
		return nil, fmt.Errorf("must have the same kind: %v != %v", from.Kind, api.Clip(out.Kind, 256))
	case out.Name != from.Name:
		return nil, fmt.Errorf("must have the same name: %v != %v", from.Name, api.Clip(out.Name, 256))
	case out.Namespace != from.Namespace:
		return nil, fmt.Errorf("must have the same namespace: %v != %v", from.Namespace, api.Clip(out.Namespace, 256))
	case out.UID != from.UID:
		return nil, fmt.Errorf("must have the same UID: %v != %v", from.UID, api.Clip(string(out.UID), 64))
	}
	at := field.NewPath("metadata")
	errs := append(metav1validation.ValidateLabels(out.Labels, at.Child("labels")),
		validation.ValidateAnnotations(out.Annotations, at.Child("annotations"))...)
	if len(errs) > 0 {
		return nil, errs.ToAggregate()
	}
	labels, annotations := out.Labels, out.Annotations
	from.ObjectMeta.DeepCopyInto(&out.ObjectMeta)
	out.Labels, out.Annotations = labels, annotations
	return out, nil
}
