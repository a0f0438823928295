package forward

import (
	"bytes"
	"compress/flate"
	"compress/gzip"
	"errors"
	"io"
	"mime"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strings"

	"golang.org/x/net/html"
	"golang.org/x/net/html/atom"
)

const (
	// maxHTMLToken is the maximum size of an HTML tag or text while links are rewritten. After a
	// longer tag or text, the rest of the document is copied unchanged.
	maxHTMLToken = 256 << 10
	// htmlChunk is the number of rewritten bytes that are collected before they are returned to the
	// reader.
	htmlChunk = 16 << 10
)

// linkAttributes are the attributes of HTML elements that hold a URL:
// https://html.spec.whatwg.org/multipage/indices.html and
// https://www.w3.org/TR/REC-html40/index/attributes.html.
var linkAttributes = map[atom.Atom][]string{
	atom.A: {"href"}, atom.Area: {"href"}, atom.Base: {"href"}, atom.Link: {"href"},
	atom.Audio: {"src"}, atom.Embed: {"src"}, atom.Script: {"src"}, atom.Source: {"src"},
	atom.Video: {"poster", "src"}, atom.Img: {"longdesc", "src", "usemap"}, atom.Input: {"formaction", "src", "usemap"},
	atom.Frame: {"longdesc", "src"}, atom.Iframe: {"longdesc", "src"},
	atom.Blockquote: {"cite"}, atom.Del: {"cite"}, atom.Ins: {"cite"}, atom.Q: {"cite"},
	atom.Form: {"action"}, atom.Button: {"formaction"}, atom.Body: {"background"}, atom.Head: {"profile"},
	atom.Html: {"manifest"}, atom.Applet: {"codebase"}, atom.Command: {"icon"},
	atom.Object: {"classid", "codebase", "data", "usemap"},
}

// Links rewrites the URLs in responses of a proxied server, so that clients request them through
// the proxy. Like the API server of Kubernetes, it rewrites absolute paths in Location headers and
// in attributes of HTML.
type Links struct {
	Prefix string   // path of the proxy, without a trailing slash
	Hosts  []string // host names in URLs that refer to the server
}

// Rewrite returns the URL through the proxy for a link that is an absolute path or a URL of one of
// the Hosts. It returns URLs of other hosts, relative URLs and invalid URLs unchanged.
func (l Links) Rewrite(link string) string {
	u, err := url.Parse(link)
	if err != nil || !strings.HasPrefix(u.Path, "/") || u.Host != "" && !slices.Contains(l.Hosts, u.Host) {
		return link
	}
	u.Scheme, u.Host, u.User = "", "", nil
	if u.Path == l.Prefix || strings.HasPrefix(u.Path, l.Prefix+"/") {
		return u.String()
	}
	raw := u.EscapedPath()
	joined := path.Join(l.Prefix, raw)
	if strings.HasSuffix(raw, "/") {
		joined += "/"
	}
	if u.Path, err = url.PathUnescape(joined); err != nil {
		return link
	}
	u.RawPath = joined
	return u.String()
}

// Apply rewrites the Location header of a response, or its body if it is HTML. The body is
// rewritten while it is read; at most maxHTMLToken bytes of it are buffered.
func (l Links) Apply(resp *http.Response) error {
	if location := resp.Header.Get("Location"); location != "" {
		resp.Header.Set("Location", l.Rewrite(location))
		return nil
	}
	media, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	whole := resp.StatusCode != http.StatusPartialContent && resp.StatusCode != http.StatusSwitchingProtocols
	if media != "text/html" || !whole || resp.Body == nil || resp.Body == http.NoBody ||
		resp.Request.Method == http.MethodHead {
		return nil
	}
	body := &htmlBody{body: resp.Body, links: l}
	var src io.Reader = resp.Body
	switch resp.Header.Get("Content-Encoding") {
	case "":
		body.write = &body.ready
	case "gzip":
		unzipped, err := gzip.NewReader(src)
		if err != nil {
			return err
		}
		zip := gzip.NewWriter(&body.ready)
		src, body.write, body.finish = unzipped, zip, zip.Close
	case "deflate":
		deflated, err := flate.NewWriter(&body.ready, flate.DefaultCompression)
		if err != nil {
			return err
		}
		src, body.write, body.finish = flate.NewReader(src), deflated, deflated.Close
	default: // unsupported encoding
		return nil
	}
	body.src, body.tokens = src, html.NewTokenizer(src)
	body.tokens.SetMaxBuf(maxHTMLToken)
	resp.Body, resp.ContentLength = body, -1
	resp.Header.Del("Content-Length")
	return nil
}

// htmlBody is an HTML response body that rewrites its links while it is read.
type htmlBody struct {
	body   io.Closer
	src    io.Reader
	tokens *html.Tokenizer
	links  Links
	write  io.Writer    // ready, or a compressor that writes to ready
	finish func() error // completes the compressed data; may be nil
	rest   io.Reader    // copied unchanged after a token that is too long; nil before
	ready  bytes.Buffer
	err    error
}

// Read returns rewritten HTML. It implements io.Reader.
func (b *htmlBody) Read(p []byte) (int, error) {
	for b.ready.Len() == 0 && b.err == nil {
		b.fillBuffer()
	}
	if b.ready.Len() > 0 {
		return b.ready.Read(p)
	}
	return 0, b.err
}

// Close closes the original body. It implements io.Closer.
func (b *htmlBody) Close() error { return b.body.Close() }

// fillBuffer rewrites tags until htmlChunk bytes are ready or the document ends.
func (b *htmlBody) fillBuffer() {
	if b.rest != nil {
		b.copyRest()
		return
	}
	for written := 0; written < htmlChunk; {
		kind := b.tokens.Next()
		if kind == html.ErrorToken {
			b.finishTokens(b.tokens.Err())
			return
		}
		text := b.tokens.Raw()
		if kind == html.StartTagToken || kind == html.SelfClosingTagToken {
			text = b.rewriteTag(slices.Clone(text))
		}
		written += len(text)
		if _, b.err = b.write.Write(text); b.err != nil {
			return
		}
	}
}

// rewriteTag returns the tag with its links rewritten. A tag without links is returned unchanged.
func (b *htmlBody) rewriteTag(raw []byte) []byte {
	token, changed := b.tokens.Token(), false
	for i, a := range token.Attr {
		if !slices.Contains(linkAttributes[token.DataAtom], a.Key) {
			continue
		}
		if to := b.links.Rewrite(a.Val); to != a.Val {
			token.Attr[i].Val, changed = to, true
		}
	}
	if !changed {
		return raw
	}
	return []byte(token.String())
}

// finishTokens handles the end of tokenizing: the end of the document, an error, or a token that is
// too long. In the last case, the rest of the document is copied unchanged.
func (b *htmlBody) finishTokens(err error) {
	if errors.Is(err, html.ErrBufferExceeded) {
		b.rest = io.MultiReader(bytes.NewReader(slices.Concat(b.tokens.Raw(), b.tokens.Buffered())), b.src)
		return
	}
	if errors.Is(err, io.EOF) {
		if _, failed := b.write.Write(b.tokens.Raw()); failed != nil {
			err = failed
		}
		err = b.finishCompression(err)
	}
	b.err = err
}

// copyRest copies a part of the rest of the document without rewriting links.
func (b *htmlBody) copyRest() {
	_, err := io.CopyN(b.write, b.rest, htmlChunk)
	if errors.Is(err, io.EOF) {
		err = b.finishCompression(err)
	}
	b.err = err
}

// finishCompression completes the compressed data. If completing fails, it returns the error,
// otherwise err.
func (b *htmlBody) finishCompression(err error) error {
	if b.finish == nil {
		return err
	}
	if failed := b.finish(); failed != nil {
		return failed
	}
	return err
}
