package endpoints

import (
	"fmt"
	"net/http"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
)

// WriteDocument responds with an object that is not a resource, such as a discovery document. It
// uses the best media type of the Accept header.
func (h *Handler) WriteDocument(w http.ResponseWriter, r *http.Request, obj runtime.Object) {
	f, err := negotiateFormat(r, func(f Format) bool {
		return f.As == viewObject && !f.sequence
	}, mediaJSON, mediaYAML, mediaProto, mediaCBOR)
	if err != nil {
		h.WriteError(w, r, err)
		return
	}
	h.writeDocument(w, r, obj, f, "")
}

// WriteDocumentAs is like WriteDocument, but with the given media type instead of the Accept
// header. params are appended to the Content-Type.
func (h *Handler) WriteDocumentAs(w http.ResponseWriter, r *http.Request, obj runtime.Object, media, params string) {
	f, ok := parseFormat(Clause{Media: media})
	if !ok || f.sequence {
		h.WriteError(w, r, notAcceptable(mediaJSON, mediaYAML, mediaProto, mediaCBOR))
		return
	}
	f.Pretty = wantsPretty(r)
	h.writeDocument(w, r, obj, f, params)
}

func (h *Handler) writeDocument(
	w http.ResponseWriter, r *http.Request, obj runtime.Object, format Format, params string,
) {
	data, err := h.encodeAs(obj, format)
	if err != nil {
		h.WriteError(w, r, apierrors.NewInternalError(fmt.Errorf("encoding a document: %w", err)))
		return
	}
	writeBytes(w, r, format.Media+params, http.StatusOK, data)
}
